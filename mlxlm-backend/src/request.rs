//! The requests of a model, and the queue in which they wait. The thread that computes and the
//! callers share both. A streaming request contains undelivered tokens, the end, and the times.
//! `reply.rs` produces the tokens, and `replies.rs` delivers them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use inference::kit::Clock;
use inference::{Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Result, Token};
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::Value;

use crate::protocol::{Reply, Rows};
use crate::session::POLL;

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
pub enum Job {
    /// A streaming reply.
    Stream(Arc<Request>),
    /// A request with a single answer.
    Ask(Value, Sender<Result<Reply>>),
    /// A request for rows of logits.
    Rows(Value, Sender<Result<Rows>>),
}

pub fn closed() -> Error {
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

    /// Appends a job to the queue.
    ///
    /// # Errors
    /// If the model was closed.
    pub fn push(&self, job: Job) -> Result<()> {
        self.check_open()?;
        self.queue.lock().jobs.push_back(job);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the next job. Returns `None` after the model was closed.
    pub fn next(&self) -> Option<Job> {
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

    /// Ends the thread after its current job.
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    /// Releases all waiting callers when the thread ends.
    pub fn leave(&self) {
        let jobs = {
            let mut queue = self.queue.lock();
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

/// A request and its results so far.
#[derive(Debug)]
pub struct Request {
    /// The message for the bridge, without the request's id.
    pub message: Value,
    /// The options of the request.
    pub options: GenerateOptions,
    pub(crate) core: Arc<Core>,
    mail: Mutex<Mail>,
    pub(crate) changed: Condvar,
}

#[derive(Debug)]
pub(crate) struct Mail {
    pub(crate) ready: VecDeque<Token>,
    /// How the request ended. The tokens in `ready` precede the end.
    pub(crate) end: Option<Result<FinishReason>>,
    /// Whether the prompt was accepted.
    pub(crate) accepted: bool,
    /// Whether the caller has dropped the stream.
    pub(crate) abandoned: bool,
    pub(crate) clock: Clock,
}

impl Request {
    /// A new request.
    pub fn new(core: Arc<Core>, message: Value, options: GenerateOptions) -> Self {
        Self {
            message,
            options,
            core,
            mail: Mutex::new(Mail {
                ready: VecDeque::new(),
                end: None,
                accepted: false,
                abandoned: false,
                clock: Clock::queued(),
            }),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock()
    }

    /// Checks whether the request must end now: it was cancelled, its deadline has passed, or its
    /// model was closed.
    ///
    /// # Errors
    /// The reason why the request must end.
    pub fn check(&self) -> Result<()> {
        self.options.check_interrupt()?;
        self.core.check_open()
    }

    /// Whether the caller has dropped the stream.
    pub fn is_abandoned(&self) -> bool {
        self.mail().abandoned
    }

    /// Records that the request has left the queue.
    pub fn begin(&self) {
        self.mail().clock.begin();
    }

    /// Records that the prompt was accepted.
    pub fn accepted(&self, prompt_tokens: usize) {
        let mut mail = self.mail();
        mail.accepted = true;
        mail.clock.counts().prompt_tokens = prompt_tokens;
        drop(mail);
        self.changed.notify_all();
    }

    /// Reports that `done` tokens of the prompt are processed.
    ///
    /// # Errors
    /// If the caller's progress callback panics. The panic must not end the model's thread.
    pub fn progressed(&self, done: usize) -> Result<()> {
        let Some(progress) = &self.options.prefill.progress else {
            return Ok(());
        };
        let total = self.mail().clock.counts().prompt_tokens;
        catch_unwind(AssertUnwindSafe(|| progress.report(done.min(total), total))).map_err(|_| {
            Error::new(
                ErrorKind::Engine,
                "the callback for the prompt's progress panicked",
            )
        })
    }

    /// Whether the request has ended, for any reason.
    pub fn has_ended(&self) -> bool {
        self.mail().end.is_some()
    }

    /// Records that a token was computed.
    pub fn produced(&self) {
        let clock = &mut self.mail().clock;
        clock.token();
        clock.counts().generated_tokens += 1;
    }

    /// Records the memory of the request, in bytes.
    pub fn took(&self, peak: u64, active: u64) {
        let mut mail = self.mail();
        let counts = mail.clock.counts();
        (counts.peak_memory_bytes, counts.active_memory_bytes) = (peak, active);
    }

    /// Delivers tokens to the caller.
    pub fn deliver(&self, tokens: impl IntoIterator<Item = Token>) {
        self.mail().ready.extend(tokens);
        self.changed.notify_all();
    }

    /// If `ahead` tokens are undelivered, waits a moment. Returns whether they are still
    /// undelivered.
    pub fn is_ahead(&self, ahead: usize) -> bool {
        let mut mail = self.mail();
        let behind = |mail: &mut Mail| mail.ready.len() >= ahead && !mail.abandoned;
        let waited = self.changed.wait_while_for(&mut mail, behind, POLL);
        waited.timed_out()
    }

    /// Ends the request. Does nothing if it has already ended.
    pub fn end(&self, how: Result<FinishReason>) {
        let mut mail = self.mail();
        if mail.end.is_none() {
            mail.end = Some(how);
            mail.clock.stop();
            // The metrics are published before the caller can see the end, so that the model's
            // metrics are those of this request.
            self.core.publish(mail.clock.metrics());
        }
        drop(mail);
        self.changed.notify_all();
    }
}
