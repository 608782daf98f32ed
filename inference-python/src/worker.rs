//! A thread that computes without the interpreter's lock, so that other Python threads continue. A
//! signal, such as that of Ctrl-C, ends the computation at its next step.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use inference::{CancelToken, Error, ErrorKind};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::exception;

/// The time between two checks for signals.
const POLL: Duration = Duration::from_millis(50);

/// The number of events that the thread may be ahead of the interpreter.
const AHEAD: usize = 16;

/// What a thread reports.
pub(crate) enum Report<E, T> {
    /// An intermediate result.
    Event(E),
    /// The result. It is the last report.
    Done(T),
}

/// Sends the reports of a thread.
pub(crate) struct Reporter<E, T>(SyncSender<Report<E, T>>);

impl<E, T> Reporter<E, T> {
    /// Sends an event. Returns `false` if the receiver is gone.
    pub(crate) fn event(&self, event: E) -> bool {
        self.0.send(Report::Event(event)).is_ok()
    }
}

/// A thread, and the receiver of its reports.
pub(crate) struct Worker<E, T> {
    reports: Mutex<Option<Receiver<Report<E, T>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    cancel: CancelToken,
}

impl<E: Send + 'static, T: Send + 'static> Worker<E, T> {
    /// Starts `work` on a thread. It must end soon after `cancel` is set.
    pub(crate) fn start(
        cancel: CancelToken,
        work: impl FnOnce(&Reporter<E, T>) -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(AHEAD);
        let reporter = Reporter(sender);
        let thread = std::thread::Builder::new()
            .name(String::from("rust-mlx"))
            .spawn(move || {
                let done = work(&reporter);
                // An error means that the receiver is gone.
                let _ = reporter.0.send(Report::Done(done));
            })?;
        Ok(Self {
            reports: Mutex::new(Some(receiver)),
            thread: Mutex::new(Some(thread)),
            cancel,
        })
    }

    /// Waits for the next report; `None` after the last one, and after [`Worker::stop`].
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<Report<E, T>>> {
        loop {
            // The lock is taken without the interpreter's lock, so that two threads that read the
            // same reports cannot wait for each other.
            let waited = py.detach(|| {
                let reports = self.reports.lock();
                reports.as_ref().map(|reports| reports.recv_timeout(POLL))
            });
            match waited {
                None => return Ok(None),
                Some(Ok(report)) => {
                    if matches!(report, Report::Done(_)) {
                        self.stop(py);
                    }
                    return Ok(Some(report));
                }
                Some(Err(RecvTimeoutError::Timeout)) => {}
                Some(Err(RecvTimeoutError::Disconnected)) => {
                    self.stop(py);
                    let error = Error::new(ErrorKind::Engine, "the computing thread panicked");
                    return Err(exception(py, &error));
                }
            }
            if let Err(interrupt) = py.check_signals() {
                self.stop(py);
                return Err(interrupt);
            }
        }
    }

    /// Ends the computation, and waits for the thread. Does nothing if it has ended.
    pub(crate) fn stop(&self, py: Python<'_>) {
        py.detach(|| {
            self.cancel.cancel();
            // Without a receiver, the thread cannot wait for one.
            drop(self.reports.lock().take());
            let thread = self.thread.lock().take();
            if let Some(thread) = thread {
                // The missing result has already reported a panic.
                let _ = thread.join();
            }
        });
    }
}
