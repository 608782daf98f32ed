//! Collects a whole reply from its events, for callers that do not stream.

use super::{Diagnosis, Event};

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Text for the user. It includes the text of malformed calls.
    pub content: String,
    /// The model's reasoning.
    pub reasoning: String,
    /// The complete calls, in order.
    pub calls: Vec<Call>,
    /// The faults of malformed calls and headers.
    pub diagnoses: Vec<Diagnosis>,
}

/// A complete call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the call in the reply. Malformed calls leave gaps.
    pub index: usize,
    /// The call's id.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// The arguments, the JSON text of one object.
    pub arguments: String,
}

impl Reply {
    /// Joins events to a reply. A call without an end is omitted; its text is content.
    pub fn collect(events: impl IntoIterator<Item = Event>) -> Self {
        let mut reply = Self::default();
        let mut open: Option<Call> = None;
        for event in events {
            match event {
                Event::Content(text) => reply.content.push_str(&text),
                Event::Reasoning(text) => reply.reasoning.push_str(&text),
                Event::CallStarted { index, id, name } => {
                    open = Some(Call {
                        index,
                        id,
                        name,
                        arguments: String::new(),
                    });
                }
                Event::ArgumentsDelta { index, delta } => {
                    if let Some(call) = open.as_mut().filter(|call| call.index == index) {
                        call.arguments.push_str(&delta);
                    }
                }
                Event::CallEnded { index } => {
                    reply
                        .calls
                        .extend(open.take().filter(|call| call.index == index));
                }
                Event::Malformed(diagnosis) => {
                    open = None;
                    reply.diagnoses.push(diagnosis);
                }
            }
        }
        reply
    }
}
