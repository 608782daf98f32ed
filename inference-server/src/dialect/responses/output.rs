//! Builds the items of a response and its stream events. For an unstreamed answer, the caller uses
//! only the last event, which contains the complete response.

use inference::{FinishReason, GenerateMetrics};
use serde_json::{Value, json};

use crate::error::{ApiError, Family};
use crate::pipeline::run::{End, Item};
use crate::reply::Delta;

/// A generator of ids for the items of a response.
type Names = Box<dyn FnMut(&str) -> String + Send>;

/// The item that is being written.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call {
        index: usize,
        call_id: String,
        name: String,
    },
}

/// A growing response.
pub(super) struct Output {
    /// The fields of the response that do not change.
    response: Value,
    names: Names,
    items: Vec<Value>,
    open: Option<Open>,
    /// The sequence number of the next event.
    number: u64,
    begun: bool,
    reasoned: usize,
    /// Whether to send only the last event.
    last_only: bool,
}

impl Output {
    /// A response with these fixed fields. `status`, `output` and the fields derived from them are
    /// added later.
    pub(super) fn new(response: Value, names: impl FnMut(&str) -> String + Send + 'static) -> Self {
        Self {
            response,
            names: Box::new(names),
            items: Vec::new(),
            open: None,
            number: 0,
            begun: false,
            reasoned: 0,
            last_only: false,
        }
    }

    /// Sends only the last event.
    pub(super) fn last_only(mut self) -> Self {
        self.last_only = true;
        self
    }

    fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = json!({"type": kind, "sequence_number": self.number});
        self.number += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        event
    }

    fn response(&self, status: &str) -> Value {
        let mut response = self.response.clone();
        response["status"] = status.into();
        response["output"] = self.items.as_slice().into();
        response
    }

    /// Sends the events that start the response.
    fn begin(&mut self, events: &mut Vec<Value>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            events.push(self.event(kind, json!({"response": response})));
        }
    }

    fn part(kind: &Kind, text: &str) -> Value {
        match kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    fn item(open: &Open, status: &str) -> Value {
        let (id, text) = (&open.id, &open.text);
        match &open.kind {
            Kind::Message | Kind::Reasoning => {
                let content = match status {
                    "in_progress" => json!([]),
                    _ => json!([Self::part(&open.kind, text)]),
                };
                if open.kind == Kind::Reasoning {
                    return json!({"id": id, "type": "reasoning", "status": status, "summary": [],
                        "content": content});
                }
                json!({"id": id, "type": "message", "status": status, "role": "assistant",
                    "content": content})
            }
            Kind::Call { call_id, name, .. } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id,
                "name": name, "arguments": text,
            }),
        }
    }

    /// Begins an item, unless the open one is of this kind.
    fn open(&mut self, kind: Kind, events: &mut Vec<Value>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", events);
        let prefix = match kind {
            Kind::Message => "msg_",
            Kind::Reasoning => "rs_",
            Kind::Call { .. } => "fc_",
        };
        let open = Open {
            id: (self.names)(prefix),
            kind,
            text: String::new(),
        };
        let (at, item) = (self.items.len(), Self::item(&open, "in_progress"));
        let added = json!({"output_index": at, "item": item});
        events.push(self.event("response.output_item.added", added));
        if !matches!(open.kind, Kind::Call { .. }) {
            let part = Self::part(&open.kind, "");
            let added =
                json!({"item_id": open.id, "output_index": at, "content_index": 0, "part": part});
            events.push(self.event("response.content_part.added", added));
        }
        self.open = Some(open);
    }

    /// Adds text to the open item.
    fn more(&mut self, text: &str, events: &mut Vec<Value>) {
        let at = self.items.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let id = open.id.as_str();
        let (kind, fields) = match open.kind {
            Kind::Message => (
                "response.output_text.delta",
                json!({"item_id": id, "output_index": at, "content_index": 0, "delta": text,
                    "logprobs": []}),
            ),
            Kind::Reasoning => (
                "response.reasoning_text.delta",
                json!({"item_id": id, "output_index": at, "content_index": 0, "delta": text}),
            ),
            Kind::Call { .. } => (
                "response.function_call_arguments.delta",
                json!({"item_id": id, "output_index": at, "delta": text}),
            ),
        };
        events.push(self.event(kind, fields));
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let at = self.items.len();
        let place = json!({"item_id": open.id, "output_index": at, "content_index": 0});
        let with = |name: &str, value: Value| {
            let mut fields = place.clone();
            fields[name] = value;
            fields
        };
        let part = Self::part(&open.kind, &open.text);
        match &open.kind {
            Kind::Message => {
                let mut done = with("text", open.text.as_str().into());
                done["logprobs"] = json!([]);
                events.push(self.event("response.output_text.done", done));
                events.push(self.event("response.content_part.done", with("part", part)));
            }
            Kind::Reasoning => {
                let done = with("text", open.text.as_str().into());
                events.push(self.event("response.reasoning_text.done", done));
                events.push(self.event("response.content_part.done", with("part", part)));
            }
            Kind::Call { name, .. } => {
                let done = json!({"item_id": open.id, "output_index": at, "name": name,
                    "arguments": open.text});
                events.push(self.event("response.function_call_arguments.done", done));
            }
        }
        let item = Self::item(&open, status);
        self.items.push(item.clone());
        let done = json!({"output_index": at, "item": item});
        events.push(self.event("response.output_item.done", done));
    }

    fn deltas(&mut self, deltas: Vec<Delta>, events: &mut Vec<Value>) {
        for delta in deltas {
            match delta {
                Delta::Content(text) => {
                    self.open(Kind::Message, events);
                    self.more(&text, events);
                }
                Delta::Reasoning(text) => {
                    self.open(Kind::Reasoning, events);
                    self.more(&text, events);
                }
                Delta::ToolCall { index, id, name } => {
                    let call_id = id;
                    let call = Kind::Call {
                        index,
                        call_id,
                        name,
                    };
                    self.open(call, events);
                }
                Delta::Arguments { index, json } => {
                    // Items cannot overlap, so further arguments of an ended call are ignored.
                    let grows = self.open.as_ref().map(|open| &open.kind);
                    if matches!(grows, Some(Kind::Call { index: at, .. }) if *at == index) {
                        self.more(&json, events);
                    }
                }
                Delta::CallEnded { .. } => self.close("completed", events),
                // The client has received no part of this call, so it gets the call's text as
                // content instead.
                Delta::CallBroken { .. } if self.last_only => self.open = None,
                Delta::CallBroken { .. } => self.close("incomplete", events),
            }
        }
    }

    fn end(&mut self, end: &End, events: &mut Vec<Value>) {
        let cut = end.reason == FinishReason::Length;
        let status = if cut { "incomplete" } else { "completed" };
        self.close(status, events);
        let mut response = self.response(status);
        if cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = usage(&end.metrics, self.reasoned);
        let kind = format!("response.{status}");
        events.push(self.event(&kind, json!({"response": response})));
    }

    /// Returns the events of one item, and whether more items follow.
    pub(super) fn of(&mut self, item: Item) -> (Vec<Value>, bool) {
        let mut events = Vec::new();
        self.begin(&mut events);
        match item {
            Item::Started => {}
            Item::Token { deltas, .. } => {
                let thought = |delta: &Delta| matches!(delta, Delta::Reasoning(_));
                self.reasoned += usize::from(deltas.iter().any(thought));
                self.deltas(deltas, &mut events);
            }
            Item::End { deltas, end } => {
                self.deltas(deltas, &mut events);
                self.end(&end, &mut events);
                return (events, false);
            }
            Item::Failed(error) => {
                self.failed(&error, &mut events);
                return (events, false);
            }
        }
        (events, true)
    }

    fn failed(&mut self, error: &ApiError, events: &mut Vec<Value>) {
        self.close("incomplete", events);
        let said = &error.body(Family::OpenAi)["error"];
        let (code, message) = (&said["code"], &said["message"]);
        let mut response = self.response("failed");
        response["error"] =
            json!({"code": code.as_str().unwrap_or("server_error"), "message": message});
        let fields = json!({"code": code, "message": message, "param": said["param"]});
        events.push(self.event("error", fields));
        events.push(self.event("response.failed", json!({"response": response})));
    }
}

/// Token counts. A token that contributed to the reasoning counts as a reasoning token.
fn usage(metrics: &GenerateMetrics, reasoned: usize) -> Value {
    json!({
        "input_tokens": metrics.prompt_tokens,
        "input_tokens_details": {"cached_tokens": metrics.cached_tokens},
        "output_tokens": metrics.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
    })
}
