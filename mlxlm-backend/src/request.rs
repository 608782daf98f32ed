//! One streaming request, shared by the thread that fills it and the caller that reads it. It
//! contains undelivered tokens, the end, and the times. `reply.rs` produces the tokens.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inference::kit::Clock;
use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Result, Token, TokenSource,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde_json::Value;

use crate::session::POLL;
use crate::worker::{Core, Handle};

/// A request and its results so far.
#[derive(Debug)]
pub struct Request {
    /// The message for the bridge, without the request's id.
    pub message: Value,
    /// The options of the request.
    pub options: GenerateOptions,
    core: Arc<Core>,
    mail: Mutex<Mail>,
    changed: Condvar,
}

#[derive(Debug)]
struct Mail {
    ready: VecDeque<Token>,
    /// How the request ended. The tokens in `ready` precede the end.
    end: Option<Result<FinishReason>>,
    /// Whether the prompt was accepted.
    accepted: bool,
    /// Whether the caller has dropped the stream.
    abandoned: bool,
    clock: Clock,
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

    fn mail(&self) -> MutexGuard<'_, Mail> {
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

/// The caller's side of a [`Request`]. Dropping it cancels the request.
pub struct Replies {
    request: Arc<Request>,
    finish: Option<FinishReason>,
    /// Keeps the process alive while a caller may use it.
    _handle: Arc<Handle>,
}

impl Replies {
    /// The stream of `request`.
    pub fn new(request: Arc<Request>, handle: Arc<Handle>) -> Self {
        Self {
            request,
            finish: None,
            _handle: handle,
        }
    }

    /// Waits until the prompt was accepted, so that errors of the prompt are returned immediately.
    /// If other replies come first, it does not wait, and the stream reports such errors.
    ///
    /// # Errors
    /// The error of the prompt, or the error that ended the request.
    pub fn accepted(&mut self) -> Result<()> {
        // Cancellation and deadlines are reported by the stream, as in other backends.
        let interrupt =
            |e: &Error| matches!(e.kind(), ErrorKind::Cancelled | ErrorKind::DeadlineExceeded);
        loop {
            let now = self.request.check();
            let mail = self.request.mail();
            let end = match &mail.end {
                // Tokens come before a later error, so the stream reports that error.
                _ if mail.accepted => return Ok(()),
                Some(end) => end.clone().map(|_| ()),
                None => now,
            };
            let ended = mail.end.is_some();
            drop(mail);
            match end {
                Err(e) if interrupt(&e) => return Ok(()),
                Err(e) => return Err(self.fail(e)),
                Ok(()) if ended => return Ok(()),
                Ok(()) => {}
            }
            if self.request.core.is_behind_others(&self.request) {
                return Ok(());
            }
            let waiting = |mail: &mut Mail| mail.end.is_none() && !mail.accepted;
            let mut mail = self.request.mail();
            self.request
                .changed
                .wait_while_for(&mut mail, waiting, POLL);
        }
    }

    fn fail(&mut self, error: Error) -> Error {
        let reason = FinishReason::of_error(&error);
        self.finish = Some(reason);
        self.abandon(Err(error.clone()));
        error
    }

    fn abandon(&self, how: Result<FinishReason>) {
        self.request.mail().abandoned = true;
        self.request.end(how);
    }
}

impl Iterator for Replies {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        if self.finish.is_some() {
            return None;
        }
        loop {
            // A caller that cancelled gets no tokens that were computed ahead.
            let interrupted = self.request.check();
            let mut mail = self.request.mail();
            if let Some(Ok(reason)) = &mail.end
                && mail.ready.is_empty()
            {
                self.finish = Some(*reason);
                return None;
            }
            if let Err(e) = interrupted {
                drop(mail);
                return Some(Err(self.fail(e)));
            }
            if let Some(token) = mail.ready.pop_front() {
                drop(mail);
                self.request.changed.notify_all();
                return Some(Ok(token));
            }
            if let Some(Err(e)) = &mail.end {
                let e = e.clone();
                drop(mail);
                return Some(Err(self.fail(e)));
            }
            let patience = match self.request.options.interrupt.deadline {
                Some(deadline) => POLL.min(deadline.saturating_duration_since(Instant::now())),
                None => POLL,
            };
            // If the deadline is this close, it is checked again immediately.
            let patience = patience.max(Duration::from_millis(1));
            self.request.changed.wait_for(&mut mail, patience);
        }
    }
}

impl TokenSource for Replies {
    fn finish_reason(&self) -> Option<FinishReason> {
        self.finish.or_else(|| {
            // The reply ends only when all its tokens were returned.
            let mail = self.request.mail();
            match &mail.end {
                Some(Ok(reason)) if mail.ready.is_empty() => Some(*reason),
                _ => None,
            }
        })
    }

    fn metrics(&self) -> GenerateMetrics {
        self.request.mail().clock.metrics()
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.abandon(Ok(FinishReason::Cancelled));
    }
}
