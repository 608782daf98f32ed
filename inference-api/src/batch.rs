//! Concurrent requests for servers: requests join and leave while others run.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::message::Prompt;
use crate::metrics::GenerateMetrics;
use crate::options::GenerateOptions;
use crate::token::{FinishReason, StopCause, Token};

/// A request of a [`BatchSession`]; unique within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(u64);

impl RequestId {
    /// The request with this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// An event of one request during a step.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub enum BatchEvent {
    /// A new token.
    Token {
        /// The request.
        row: RequestId,
        /// The token.
        token: Token,
    },
    /// The request ended and left the session.
    Done {
        /// The request.
        row: RequestId,
        /// Why it ended.
        reason: FinishReason,
        /// The cause of a [`FinishReason::Stop`], if the backend reports it.
        stop: Option<StopCause>,
        /// The request's metrics.
        metrics: Box<GenerateMetrics>,
    },
    /// The request failed and left the session. The others are not affected.
    Failed {
        /// The request.
        row: RequestId,
        /// The error.
        error: Error,
    },
}

impl BatchEvent {
    /// The request of this event.
    #[must_use]
    pub fn row(&self) -> RequestId {
        match self {
            BatchEvent::Token { row, .. }
            | BatchEvent::Done { row, .. }
            | BatchEvent::Failed { row, .. } => *row,
        }
    }
}

/// The result of [`TextModel::prepare`](crate::TextModel::prepare), alive while a clone of it
/// exists.
#[derive(Clone, Default)]
pub struct Prepared(Option<Arc<dyn Any + Send + Sync>>);

impl Prepared {
    /// Wraps a value.
    #[must_use]
    pub fn new(owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(owner))
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Prepared").field(&self.0.is_some()).finish()
    }
}

/// Requests that run together: each step is one forward pass for all of them. Each request gets the
/// same reply as if it ran alone.
///
/// A server adds requests as they arrive, calls [`BatchSession::step`] while any are running, and
/// delivers the events. Dropping the session cancels all of them.
pub trait BatchSession: Send {
    /// Adds a request, which runs from the next step on.
    ///
    /// # Errors
    /// As [`TextModel::generate`](crate::TextModel::generate). The others are not affected.
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId>;

    /// Removes a running request; false if the number is unknown.
    fn remove(&mut self, row: RequestId) -> bool;

    /// The number of requests in the session.
    fn len(&self) -> usize;

    /// Whether the session has no requests.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Computes one step: a part of each new prompt, and one token of each other request.
    /// Cancellation, deadline and failure of a request are reported as its events.
    ///
    /// # Errors
    /// When the whole session cannot continue.
    fn step(&mut self) -> Result<VecDeque<BatchEvent>>;
}
