//! The items of a reply: text, reasoning, calls, and one end.

use std::time::Duration;

use inference::{FinishReason, GenerateMetrics, StopCause, Token};

use crate::error::ApiError;
use crate::reply::Delta;

/// An item of a reply.
#[derive(Debug)]
pub(crate) enum Item {
    /// The request has left the queue.
    Started,
    /// A token, and the deltas that became final with it.
    Token {
        token: Box<Token>,
        deltas: Vec<Delta>,
    },
    /// The end of a reply, and the deltas that were withheld until then.
    End { deltas: Vec<Delta>, end: End },
    /// The failure that ended the reply.
    Failed(ApiError),
}

/// The end of a reply.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) reason: FinishReason,
    pub(crate) stop: Option<StopCause>,
    pub(crate) metrics: GenerateMetrics,
    pub(crate) queued: Duration,
}

/// A call of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: String,
}

/// The tool calls of a reply. Only complete calls count.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// The complete calls.
    pub(crate) done: Vec<Call>,
    open: Option<Call>,
}

impl Calls {
    pub(crate) fn begin(&mut self, id: String, name: String) {
        self.open = Some(Call {
            id,
            name,
            arguments: String::new(),
        });
    }

    pub(crate) fn arguments(&mut self, json: &str) {
        if let Some(call) = &mut self.open {
            call.arguments.push_str(json);
        }
    }

    pub(crate) fn end(&mut self) {
        self.done.extend(self.open.take());
    }

    pub(crate) fn give_up(&mut self) {
        self.open = None;
    }
}
