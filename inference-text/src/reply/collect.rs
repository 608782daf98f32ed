//! Collects a whole reply from its events, for callers that do not stream.

use super::{Diagnosis, Event};

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Text for the user, including the text of calls that could not be read.
    pub content: String,
    /// The model's reasoning.
    pub reasoning: String,
    /// The complete calls, in order.
    pub calls: Vec<Call>,
    /// The calls and headers that could not be read.
    pub diagnoses: Vec<Diagnosis>,
}

/// A complete call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the call in the reply. Calls that could not be read leave gaps.
    pub index: usize,
    /// The call's id.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// The arguments, the JSON text of one object.
    pub arguments: String,
}

impl Reply {
    /// Joins events. Calls without an end are left out; their text is content.
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
