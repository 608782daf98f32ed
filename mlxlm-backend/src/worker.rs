//! The thread that owns a model's process. It runs requests one after another, and ends the process
//! with its last user. `request.rs` has the queue and the state of a request; `reply.rs` and
//! `session.rs` run it.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{Builder, JoinHandle};

use inference::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::Value;

use crate::protocol::{Reply, Rows};
use crate::reply;
use crate::request::{Core, Job, Request, closed};
use crate::session::Session;

/// Owns the worker thread. Dropping the handle ends the thread and its Python process.
#[derive(Debug)]
pub struct Handle {
    core: Arc<Core>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Moves `session` to a new thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(session: Session) -> Result<Self> {
        let core = Arc::new(Core::default());
        let shared = Arc::clone(&core);
        let thread = Builder::new()
            .name("mlxlm".into())
            .spawn(move || run(&shared, session))
            .map_err(|e| {
                Error::new(ErrorKind::Io, format!("cannot start a thread: {e}")).with_source(e)
            })?;
        Ok(Self {
            core,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The state shared with the thread.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Runs a request when its turn comes.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after [`Handle::close`].
    pub fn stream(&self, request: Arc<Request>) -> Result<()> {
        self.core.push(Job::Stream(request))
    }

    /// Sends a request that has one answer, and waits for it.
    ///
    /// # Errors
    /// The bridge's error, the loss of the process, or [`ErrorKind::Closed`].
    pub fn ask(&self, message: Value) -> Result<Reply> {
        let (to, answer) = channel();
        self.core.push(Job::Ask(message, to))?;
        // A job is dropped only after its model was closed.
        answer.recv().unwrap_or_else(|_| Err(closed()))
    }

    /// Requests rows of numbers, and waits for them.
    ///
    /// # Errors
    /// Those of [`Handle::ask`].
    pub fn rows(&self, message: Value) -> Result<Rows> {
        let (to, answer) = channel();
        self.core.push(Job::Rows(message, to))?;
        answer.recv().unwrap_or_else(|_| Err(closed()))
    }

    /// Ends the thread and the process. Running requests end with [`ErrorKind::Closed`].
    pub fn close(&self) {
        self.core.close();
        // A concurrent caller of `close` waits, too.
        let mut thread = self.thread.lock();
        if let Some(thread) = thread.take() {
            // The thread has already reported its panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// Releases all waiting callers when the thread ends, whatever the cause.
struct Leaving<'a>(&'a Core);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

fn run(core: &Arc<Core>, mut session: Session) {
    let _leaving = Leaving(core);
    while let Some(job) = core.next() {
        let open = || core.check_open();
        match job {
            Job::Stream(request) => {
                // Dropping this value ends the request in any case, even after a panic.
                let ended = Ended(&request);
                reply::stream(&mut session, &request, core);
                drop(ended);
            }
            Job::Ask(message, to) => {
                let _ = to.send(session.ask(message, &open));
            }
            Job::Rows(message, to) => {
                let _ = to.send(reply::rows(&mut session, &message, &open));
            }
        }
    }
    session.quit();
}

struct Ended<'a>(&'a Request);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.end(Err(Error::new(
            ErrorKind::Engine,
            "a fault of the backend ended the request",
        )));
    }
}
