//! The caller's side of a streaming request: the stream of its tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inference::{Error, ErrorKind, FinishReason, GenerateMetrics, Result, Token, TokenSource};

use crate::request::{Mail, Request};
use crate::session::POLL;
use crate::worker::Handle;

/// The caller's side of a [`Request`]. Dropping it cancels the request.
pub struct Replies {
    request: Arc<Request>,
    finish: Option<FinishReason>,
    /// Keeps the process alive while a caller may use it.
    _handle: Arc<Handle>,
}

impl Replies {
    /// Creates the stream of `request`.
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
