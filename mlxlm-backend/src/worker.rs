//! The thread that owns a model's process. It takes requests in turn, and ends the process when its
//! last user is gone. What a request is made of is in `request.rs`, how one is done in `reply.rs`
//! and `session.rs`.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use inference::{Error, ErrorKind, GenerateMetrics, Result};
use serde_json::Value;

use crate::protocol::Reply;
use crate::reply;
use crate::request::Request;
use crate::session::Session;

/// What the thread and everybody else share.
#[derive(Debug, Default)]
pub struct Core {
    queue: Mutex<Queue>,
    changed: Condvar,
    metrics: Mutex<GenerateMetrics>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The reply that streams now.
    running: Option<Arc<Request>>,
    /// The model was closed: nothing more is done.
    closed: bool,
    /// The thread has ended, which it does only when told to, or by a fault of ours.
    gone: bool,
}

/// What the thread does in turn.
#[derive(Debug)]
enum Job {
    /// A reply that streams.
    Stream(Arc<Request>),
    /// A question with one answer.
    Ask(Value, Sender<Result<Reply>>),
    /// Several rows of numbers.
    Rows(Value, Sender<Result<Rows>>),
}

/// Logits of some positions.
#[derive(Debug, Default)]
pub struct Rows {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// How many rows there are.
    pub count: usize,
    /// The rows, one after another.
    pub values: Vec<f32>,
}

/// A mutex of plain data is usable even after a panic elsewhere.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the model was closed; load it again")
}

impl Core {
    /// An error once the model was closed.
    pub fn check_open(&self) -> Result<()> {
        let queue = locked(&self.queue);
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

    /// Whether a caller waits for the running request.
    pub fn is_wanted(&self) -> bool {
        !locked(&self.queue).jobs.is_empty()
    }

    /// Whether replies that others wait for come before `request`.
    pub fn is_behind_others(&self, request: &Arc<Request>) -> bool {
        let queue = locked(&self.queue);
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

    /// Remembers the figures of the request that ended last.
    pub fn publish(&self, metrics: GenerateMetrics) {
        *locked(&self.metrics) = metrics;
    }

    /// The figures of the request that ended last.
    pub fn metrics(&self) -> GenerateMetrics {
        locked(&self.metrics).clone()
    }

    fn push(&self, job: Job) -> Result<()> {
        self.check_open()?;
        locked(&self.queue).jobs.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// The next job, or `None` once closed.
    fn next(&self) -> Option<Job> {
        let mut queue = locked(&self.queue);
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
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn close(&self) {
        locked(&self.queue).closed = true;
        self.changed.notify_all();
    }
}

/// The thread's owner. When the last one is dropped, thread and process end.
#[derive(Debug)]
pub struct Handle {
    core: Arc<Core>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Gives `session` to a thread of its own.
    ///
    /// # Errors
    /// When there can be no thread.
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

    /// Has a request done when its turn comes.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] after [`Handle::close`].
    pub fn stream(&self, request: Arc<Request>) -> Result<()> {
        self.core.push(Job::Stream(request))
    }

    /// Sends a request that has one answer, and waits for it.
    ///
    /// # Errors
    /// What the other side says, that it was lost, or [`ErrorKind::Closed`].
    pub fn ask(&self, message: Value) -> Result<Reply> {
        let (to, answer) = channel();
        self.core.push(Job::Ask(message, to))?;
        // A job that is thrown away was of a model that was closed.
        answer.recv().unwrap_or_else(|_| Err(closed()))
    }

    /// Asks for rows of numbers, and waits for them.
    ///
    /// # Errors
    /// As [`Handle::ask`].
    pub fn rows(&self, message: Value) -> Result<Rows> {
        let (to, answer) = channel();
        self.core.push(Job::Rows(message, to))?;
        answer.recv().unwrap_or_else(|_| Err(closed()))
    }

    /// Ends thread and process; running requests end with [`ErrorKind::Closed`].
    pub fn close(&self) {
        self.core.close();
        // A concurrent caller of `close` waits as well.
        let mut thread = locked(&self.thread);
        if let Some(thread) = thread.take() {
            // A panic over there was reported where it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// Releases all waiting callers, however the thread ends.
struct Leaving<'a>(&'a Core);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let jobs = {
            let mut queue = locked(&self.0.queue);
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
                // Ended in any case, by a panic too.
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
            "the request was given up by a fault of the backend",
        )));
    }
}
