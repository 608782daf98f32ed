//! Batch sessions for servers: requests join and leave while other requests run.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::message::Prompt;
use crate::metrics::GenerateMetrics;
use crate::options::GenerateOptions;
use crate::token::{FinishReason, StopCause, Token};

/// The id of a request, unique within its [`BatchSession`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(u64);

impl RequestId {
    /// The id with this number.
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
    /// The request has ended and left the session.
    Done {
        /// The request.
        row: RequestId,
        /// Why the request ended.
        reason: FinishReason,
        /// The cause of a [`FinishReason::Stop`], if the backend reports it.
        stop: Option<StopCause>,
        /// The request's metrics.
        metrics: Box<GenerateMetrics>,
    },
    /// The request has failed and left the session. Other requests are not affected.
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

/// The result of [`TextModel::prepare`](crate::TextModel::prepare). The prepared work stays
/// available while a clone exists.
#[derive(Clone, Default)]
pub struct Prepared(Option<Arc<dyn Any + Send + Sync>>);

impl Prepared {
    /// Wraps `owner`, the value that owns the prepared work.
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

/// Requests that run together. Each step is one forward pass for all requests. Each request gets
/// the reply that it would get alone.
///
/// A server adds requests as they arrive, calls [`BatchSession::step`] while any request runs, and
/// delivers the events. Dropping the session cancels all requests.
pub trait BatchSession: Send {
    /// Adds a request, which runs from the next step on.
    ///
    /// # Errors
    /// As [`TextModel::generate`](crate::TextModel::generate). Other requests are not affected.
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId>;

    /// Removes a running request. Returns false if there is no such request.
    fn remove(&mut self, row: RequestId) -> bool;

    /// The number of requests in the session.
    fn len(&self) -> usize;

    /// Whether the session has no requests.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Computes one step: a part of each new prompt, and one token of each other request. If a
    /// request is cancelled, passes its deadline or fails, the step returns an event for it.
    ///
    /// # Errors
    /// If the whole session cannot continue.
    fn step(&mut self) -> Result<VecDeque<BatchEvent>>;
}
