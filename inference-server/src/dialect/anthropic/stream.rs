//! A reply as Anthropic's stream events. A reply consists of blocks, and a block must end before
//! the next one starts.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use super::{stop_reason, usage};
use crate::error::Family;
use crate::pipeline::events::sse;
use crate::pipeline::run::{Item, Reply};
use crate::reply::Delta;

/// Clients store a signature with reasoning blocks and send it back. This server ignores the
/// signature.
pub(super) const SIGNATURE: &str = "local";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    Tool(usize),
}

/// Converts the items of a reply to events.
pub(super) struct Events {
    id: String,
    model: String,
    prompt: usize,
    begun: bool,
    open: Option<Open>,
    /// Number of blocks opened so far.
    blocks: usize,
    called: bool,
}

impl Events {
    pub(super) fn new(id: String, model: &str, prompt: usize) -> Self {
        Self {
            id,
            model: model.to_owned(),
            prompt,
            begun: false,
            open: None,
            blocks: 0,
            called: false,
        }
    }

    fn begin(&mut self, events: &mut Vec<Value>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        events.push(json!({"type": "message_start", "message": {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {
                "input_tokens": self.prompt,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }}));
        events.push(json!({"type": "ping"}));
    }

    /// Ends the block that is open.
    fn close(&mut self, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let index = self.blocks - 1;
        if open == Open::Thinking {
            let delta = json!({"type": "signature_delta", "signature": SIGNATURE});
            events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        events.push(json!({"type": "content_block_stop", "index": index}));
    }

    /// Opens a block of this kind, unless one is open.
    fn open(&mut self, kind: Open, block: Value, events: &mut Vec<Value>) {
        if self.open == Some(kind) {
            return;
        }
        self.close(events);
        let index = self.blocks;
        events.push(json!({"type": "content_block_start", "index": index, "content_block": block}));
        self.open = Some(kind);
        self.blocks += 1;
    }

    fn deltas(&mut self, deltas: Vec<Delta>, events: &mut Vec<Value>) {
        for delta in deltas {
            let delta = match delta {
                Delta::Content(text) => {
                    self.open(Open::Text, json!({"type": "text", "text": ""}), events);
                    json!({"type": "text_delta", "text": text})
                }
                Delta::Reasoning(text) => {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(Open::Thinking, block, events);
                    json!({"type": "thinking_delta", "thinking": text})
                }
                Delta::ToolCall { index, id, name } => {
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(Open::Tool(index), block, events);
                    continue;
                }
                Delta::Arguments { index, json } => {
                    // Blocks cannot overlap, so further arguments of an ended call are dropped.
                    if self.open != Some(Open::Tool(index)) {
                        continue;
                    }
                    json!({"type": "input_json_delta", "partial_json": json})
                }
                Delta::CallEnded { .. } => {
                    self.called = true;
                    self.close(events);
                    continue;
                }
                // The arguments remain incomplete JSON, which shows clients that the call is
                // broken.
                Delta::CallBroken { .. } => {
                    self.close(events);
                    continue;
                }
            };
            events.push(json!({
                "type": "content_block_delta",
                "index": self.blocks - 1,
                "delta": delta,
            }));
        }
    }

    /// Returns the events of one item, and whether more items follow.
    fn of(&mut self, item: Item) -> (Vec<Value>, bool) {
        let mut events = Vec::new();
        match item {
            Item::Started => self.begin(&mut events),
            Item::Token { deltas, .. } => {
                self.begin(&mut events);
                self.deltas(deltas, &mut events);
            }
            Item::End { deltas, end } => {
                self.begin(&mut events);
                self.deltas(deltas, &mut events);
                self.close(&mut events);
                let (reason, sequence) = stop_reason(&end, self.called);
                events.push(json!({
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": usage(&end.metrics),
                }));
                events.push(json!({"type": "message_stop"}));
                return (events, false);
            }
            Item::Failed(error) => {
                events.push(error.body(Family::Anthropic));
                return (events, false);
            }
        }
        (events, true)
    }
}

/// Answers with the events of a reply.
pub(super) fn answer(reply: Reply, events: Events, ping: Duration) -> Response {
    let all = stream::unfold(Some((reply, events)), |state| async {
        let (mut reply, mut events) = state?;
        let item = reply.next().await?;
        let (values, more) = events.of(item);
        let values: Vec<Result<Event, Infallible>> = values
            .into_iter()
            .map(|value| {
                let name = value["type"].as_str().unwrap_or("error").to_owned();
                Ok(Event::default().event(name).data(value.to_string()))
            })
            .collect();
        Some((values, more.then_some((reply, events))))
    });
    sse(all.flat_map(stream::iter), ping)
}
