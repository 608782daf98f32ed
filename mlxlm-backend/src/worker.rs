//! The thread that owns a model's process. It runs requests one after another, and ends the process
//! with its last user. `request.rs` has the state of a request; `reply.rs` and `session.rs` run it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use inference::{Error, ErrorKind, GenerateMetrics, Result};
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use crate::protocol::Reply;
use crate::reply;
use crate::request::Request;
use crate::session::Session;

/// State that the thread and all callers share.
#[derive(Debug, Default)]
pub struct Core {
    queue: Mutex<Queue>,
    changed: Condvar,
    metrics: Mutex<GenerateMetrics>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The reply that is currently streamed.
    running: Option<Arc<Request>>,
    /// Whether the model was closed. After that, no request runs.
    closed: bool,
    /// Whether the thread has ended, on request or because of a bug.
    gone: bool,
}

/// A job of the thread.
#[derive(Debug)]
enum Job {
    /// A streaming reply.
    Stream(Arc<Request>),
    /// A request with a single answer.
    Ask(Value, Sender<Result<Reply>>),
    /// A request for rows of logits.
    Rows(Value, Sender<Result<Rows>>),
}

/// The logits of some positions.
#[derive(Debug, Default)]
pub struct Rows {
    /// The ids of the prompt.
    pub tokens: Vec<u32>,
    /// The number of rows.
    pub count: usize,
    /// The rows, one after another.
    pub values: Vec<f32>,
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the model was closed; load it again")
}

impl Core {
    /// An error if the model was closed.
    pub fn check_open(&self) -> Result<()> {
        let queue = self.queue.lock();
        if queue.closed {
            return Err(closed());
        }
        if queue.gone {
            return Err(Error::new(
                ErrorKind::Engine,
                "the thread of the model has ended; load the model again",
            ));
        }
        Ok(())
    }

    /// Whether another caller waits for the running request to end.
    pub fn is_wanted(&self) -> bool {
        !self.queue.lock().jobs.is_empty()
    }

    /// Whether replies of other callers run before `request`.
    pub fn is_behind_others(&self, request: &Arc<Request>) -> bool {
        let queue = self.queue.lock();
        let streams = queue.jobs.iter().filter_map(|job| match job {
            Job::Stream(request) => Some(request),
            _ => None,
        });
        queue
            .running
            .iter()
            .chain(streams)
            .take_while(|other| !Arc::ptr_eq(other, request))
            .any(|other| !other.has_ended())
    }

    /// Stores the metrics of the request that ended last.
    pub fn publish(&self, metrics: GenerateMetrics) {
        *self.metrics.lock() = metrics;
    }

    /// The metrics of the request that ended last.
    pub fn metrics(&self) -> GenerateMetrics {
        self.metrics.lock().clone()
    }

    fn push(&self, job: Job) -> Result<()> {
        self.check_open()?;
        self.queue.lock().jobs.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// The next job; `None` after the model was closed.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        queue.running = None;
        loop {
            if queue.closed {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                if let Job::Stream(request) = &job {
                    queue.running = Some(Arc::clone(request));
                }
                return Some(job);
            }
            self.changed.wait(&mut queue);
        }
    }

    fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }
}

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
        let jobs = {
            let mut queue = self.0.queue.lock();
            queue.gone = true;
            queue.running = None;
            std::mem::take(&mut queue.jobs)
        };
        for job in jobs {
            if let Job::Stream(request) = job {
                request.end(Err(closed()));
            }
        }
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
