//! Many requests at once, for servers: requests come and go while others run.

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
    /// The request of this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// What happened to a request in a step.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub enum BatchEvent {
    /// It has one more token.
    Token {
        /// The request.
        row: RequestId,
        /// Its token.
        token: Token,
    },
    /// It ended, and has left the session.
    Done {
        /// The request.
        row: RequestId,
        /// Why it ended.
        reason: FinishReason,
        /// What stopped it, where the reason is [`FinishReason::Stop`] and the backend says.
        stop: Option<StopCause>,
        /// Its metrics.
        metrics: Box<GenerateMetrics>,
    },
    /// It failed, and has left the session. The others are not affected.
    Failed {
        /// The request.
        row: RequestId,
        /// The error.
        error: Error,
    },
}

impl BatchEvent {
    /// The request it is about.
    #[must_use]
    pub fn row(&self) -> RequestId {
        match self {
            BatchEvent::Token { row, .. }
            | BatchEvent::Done { row, .. }
            | BatchEvent::Failed { row, .. } => *row,
        }
    }
}

/// What [`TextModel::prepare`](crate::TextModel::prepare) made, kept while a copy of this lives.
#[derive(Clone, Default)]
pub struct Prepared(Option<Arc<dyn Any + Send + Sync>>);

impl Prepared {
    /// Keeps a value.
    #[must_use]
    pub fn new(kept: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(kept))
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Prepared").field(&self.0.is_some()).finish()
    }
}

/// Requests that run together, one forward pass a step for all. Each gets the same as alone.
///
/// A server adds requests as they come, calls [`BatchSession::step`] while there are any, and hands
/// the events out. Dropping the session cancels all of them.
pub trait BatchSession: Send {
    /// Adds a request; it runs from the next step on.
    ///
    /// # Errors
    /// As [`TextModel::generate`](crate::TextModel::generate). The others are not affected.
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId>;

    /// Takes a request out before it ended; false when there is none of this number.
    fn remove(&mut self, row: RequestId) -> bool;

    /// The number of requests in it.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Computes one step: a part of the prompts that are new, and a token for each of the others. A
    /// request's cancellation, deadline and failure are events of its own.
    ///
    /// # Errors
    /// When the session as a whole cannot go on.
    fn step(&mut self) -> Result<VecDeque<BatchEvent>>;
}
