//! Cancellation of a request from another thread or at a deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::error::{Error, ErrorKind, Result};

/// A flag that a request shares with the threads that may cancel it. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// A flag that is not set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag. Requests that use the flag end within one token or prefill step.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the flag is set.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Conditions that end a computation early: a flag, a deadline, or both. The default has no
/// conditions.
///
/// [`GenerateOptions`](crate::GenerateOptions) contains one for generation.
///
/// ```
/// use std::time::{Duration, Instant};
/// use inference::{CancelToken, ErrorKind, Interrupt};
///
/// let cancel = CancelToken::new();
/// let interrupt = Interrupt::new()
///     .with_deadline(Instant::now() + Duration::from_secs(60))
///     .with_cancel(cancel.clone());
/// interrupt.check()?;
/// cancel.cancel();
/// assert_eq!(interrupt.check().unwrap_err().kind(), ErrorKind::Cancelled);
/// # Ok::<(), inference::Error>(())
/// ```
#[non_exhaustive]
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    /// Lets another thread end the computation.
    pub cancel: Option<CancelToken>,
    /// The time at which the computation ends.
    pub deadline: Option<Instant>,
}

impl Interrupt {
    /// An interrupt without conditions.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag.
    #[must_use]
    pub fn with_cancel(mut self, cancel: impl Into<Option<CancelToken>>) -> Self {
        self.cancel = cancel.into();
        self
    }

    /// Sets the deadline.
    #[must_use]
    pub fn with_deadline(mut self, deadline: impl Into<Option<Instant>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// Checks whether the computation must end now. Engines call it between steps.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] or [`ErrorKind::DeadlineExceeded`].
    pub fn check(&self) -> Result<()> {
        check(self.cancel.as_ref(), self.deadline)
    }
}

/// As [`Interrupt::check`].
pub(crate) fn check(cancel: Option<&CancelToken>, deadline: Option<Instant>) -> Result<()> {
    if cancel.is_some_and(CancelToken::is_cancelled) {
        return Err(Error::new(
            ErrorKind::Cancelled,
            "the request was cancelled",
        ));
    }
    if deadline.is_some_and(|d| Instant::now() >= d) {
        return Err(Error::new(
            ErrorKind::DeadlineExceeded,
            "the request's deadline has passed",
        ));
    }
    Ok(())
}
