//! A reply, token by token.

use std::sync::Arc;

use inference::bindings::{Input, Reply};
use inference::{CancelToken, ErrorKind, GenerateOptions, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::raised;
use crate::shared::Shared;
use crate::worker::{Report, Worker};

/// A piece of a reply: its text, its token, and its log-probabilities as JSON.
type Piece = (String, u32, Option<String>);

/// A reply that is computed on a thread.
#[pyclass(frozen, module = "rust_mlx._native")]
pub(crate) struct Stream {
    worker: Worker<Piece, Result<Reply>>,
    reply: Mutex<Option<Reply>>,
    /// The text and tokens that were read, for a reply that is stopped.
    read: Mutex<Reply>,
}

impl Stream {
    pub(crate) fn start(
        model: Arc<Shared>,
        input: Input,
        options: GenerateOptions,
    ) -> std::io::Result<Self> {
        let cancel = CancelToken::new();
        let options = options.with_cancel(cancel.clone());
        let worker = Worker::start(cancel, move |report| {
            let stream = input.start(model.model.as_ref(), &options)?;
            Reply::collect(stream, |token| {
                let logprobs = token.logprobs.as_ref();
                let logprobs = logprobs.and_then(|all| serde_json::to_string(all).ok());
                report.event((token.text.clone(), token.id, logprobs))
            })
        })?;
        Ok(Self {
            worker,
            reply: Mutex::new(None),
            read: Mutex::new(Reply::default()),
        })
    }
}

#[pymethods]
impl Stream {
    /// The next piece: text, token and log-probabilities as JSON; `None` at the end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        match self.worker.next(py)? {
            None => Ok(None),
            Some(Report::Event(piece)) => {
                let mut read = self.read.lock();
                read.text.push_str(&piece.0);
                read.tokens.push(piece.1);
                Ok(Some(piece))
            }
            Some(Report::Done(reply)) => {
                let reply = raised(py, reply)?;
                *self.reply.lock() = Some(reply);
                Ok(None)
            }
        }
    }

    /// The reply as JSON. Before the end of the stream, it has the pieces that were read.
    fn reply(&self, py: Python<'_>) -> PyResult<String> {
        let reply = self.reply.lock().clone();
        let reply = reply.unwrap_or_else(|| self.read.lock().clone());
        let json = serde_json::to_string(&reply).map_err(|e| {
            inference::Error::new(ErrorKind::Engine, "the reply cannot be written as JSON")
                .with_source(e)
        });
        raised(py, json)
    }

    /// Ends the reply.
    fn close(&self, py: Python<'_>) {
        self.worker.stop(py);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The thread must not outlive the object, since a program may end next.
        Python::attach(|py| self.worker.stop(py));
    }
}
