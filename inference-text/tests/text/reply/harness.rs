//! Checks golden replies: a reply, its expected events, and all ways to split it into tokens.

use inference_text::reply::{Event, Format, ParserOptions, Piece, SequentialIds, Tools};
use serde_json::{Value, json};
use std::sync::Arc;

/// All markers of all formats, which a tokenizer would mark as special.
const MARKERS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|eom_id|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|observation|>",
    "<|assistant|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
];

/// A reply of a family, and its expected parts.
pub struct Golden<'a> {
    pub format: Format,
    pub tools: Arc<Tools>,
    pub prompt: &'a str,
}

impl<'a> Golden<'a> {
    pub fn new(format: Format) -> Self {
        Self {
            format,
            tools: Arc::default(),
            prompt: "",
        }
    }

    pub fn tools(mut self, tools: Value) -> Self {
        self.tools = Arc::new(Tools::from_json(&tools));
        self
    }

    pub fn prompt(mut self, prompt: &'a str) -> Self {
        self.prompt = prompt;
        self
    }

    fn options(&self) -> ParserOptions {
        ParserOptions::default()
            .with_tools(self.tools.clone())
            .with_prompt_tail(self.prompt)
            .with_ids(SequentialIds::default())
    }

    /// The events of a reply that arrives in these pieces.
    pub fn events(&self, pieces: &[(&str, bool)]) -> Vec<Event> {
        let mut parser = self.format.parser(self.options());
        let mut events = Vec::new();
        for (text, special) in pieces {
            let piece = Piece {
                id: None,
                text,
                special: *special,
            };
            events.extend(parser.feed(piece));
        }
        events.extend(parser.finish());
        assert!(parser.finish().is_empty(), "nothing comes after the end");
        assert!(parser.feed(Piece::text("more")).is_empty() || self.format == Format::none());
        events
    }

    /// Checks a reply in one piece, split at each byte, byte by byte, and with special tokens.
    ///
    /// The lines of `expected` are `content …`, `reasoning …`, `call INDEX ID NAME ARGUMENTS`,
    /// `open INDEX ID NAME ARGUMENTS` for a call without an end, and `fault …`.
    #[track_caller]
    pub fn says(&self, reply: &str, expected: &[&str]) -> &Self {
        let actual = render(self.events(&[(reply, false)]));
        assert_eq!(actual, expected, "in one piece: {reply}");
        for at in 0..=reply.len() {
            let parts = decode(&[&reply.as_bytes()[..at], &reply.as_bytes()[at..]]);
            let parts: Vec<_> = parts.iter().map(|part| (part.as_str(), false)).collect();
            assert_eq!(
                render(self.events(&parts)),
                expected,
                "cut at byte {at}: {reply}"
            );
        }
        let bytes: Vec<_> = reply.as_bytes().chunks(1).collect();
        let bytes = decode(&bytes);
        let bytes: Vec<_> = bytes.iter().map(|part| (part.as_str(), false)).collect();
        assert_eq!(
            render(self.events(&bytes)),
            expected,
            "byte by byte: {reply}"
        );
        let mut tokens = tokens(reply);
        assert_eq!(
            render(self.events(&tokens)),
            expected,
            "special tokens: {reply}"
        );
        tokens.push(("<|im_end|>", true));
        assert_eq!(
            render(self.events(&tokens)),
            expected,
            "an end-of-turn token: {reply}"
        );
        self
    }
}

/// Converts pieces of bytes to text as a streaming detokenizer does, in whole characters.
fn decode(parts: &[&[u8]]) -> Vec<String> {
    let mut buffered = Vec::new();
    let mut out = Vec::new();
    for part in parts {
        buffered.extend_from_slice(part);
        let valid = match std::str::from_utf8(&buffered) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let rest = buffered.split_off(valid);
        out.push(String::from_utf8(std::mem::replace(&mut buffered, rest)).expect("valid"));
    }
    assert!(buffered.is_empty());
    out
}

/// The pieces of a reply in which each marker is a special token.
fn tokens(reply: &str) -> Vec<(&str, bool)> {
    let mut tokens = Vec::new();
    let mut rest = reply;
    while !rest.is_empty() {
        let next = MARKERS
            .iter()
            .filter_map(|marker| Some((rest.find(marker)?, marker.len())))
            .min();
        let Some((at, length)) = next else { break };
        tokens.push((&rest[..at], false));
        tokens.push((&rest[at..at + length], true));
        rest = &rest[at + length..];
    }
    tokens.push((rest, false));
    tokens
}

/// Events as lines. Adjacent events of one kind are joined. Panics unless complete arguments are a
/// JSON object.
pub fn render(events: Vec<Event>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut open: Option<(usize, String)> = None;
    let mut last = "";
    for event in events {
        let kind = match event {
            Event::Content(text) => {
                if last == "content" {
                    lines.last_mut().expect("a line").push_str(&text);
                } else {
                    lines.push(format!("content {text}"));
                }
                "content"
            }
            Event::Reasoning(text) => {
                if last == "reasoning" {
                    lines.last_mut().expect("a line").push_str(&text);
                } else {
                    lines.push(format!("reasoning {text}"));
                }
                "reasoning"
            }
            Event::CallStarted { index, id, name } => {
                assert!(open.is_none(), "calls do not nest");
                lines.push(format!("open {index} {id} {name} "));
                open = Some((index, String::new()));
                "call"
            }
            Event::ArgumentsDelta { index, delta } => {
                let (expected, arguments) = open.as_mut().expect("an open call");
                assert_eq!(*expected, index);
                arguments.push_str(&delta);
                lines.last_mut().expect("a line").push_str(&delta);
                "call"
            }
            Event::CallEnded { index } => {
                let (expected, arguments) = open.take().expect("an open call");
                assert_eq!(expected, index);
                let value: Value = serde_json::from_str(&arguments).expect("valid JSON");
                assert!(value.is_object(), "{arguments}");
                let line = lines.last_mut().expect("a line");
                *line = line.replacen("open", "call", 1);
                "end"
            }
            Event::Malformed(diagnosis) => {
                assert_eq!(diagnosis.index, open.take().map(|open| open.0));
                lines.push(format!("fault {:?}", diagnosis.fault));
                "fault"
            }
            other => panic!("an event that the test does not know: {other:?}"),
        };
        last = kind;
    }
    assert!(open.is_none(), "an open call has an end or a diagnosis");
    lines
}

/// One tool `f` with one argument of each type, and `g` without arguments.
pub fn typed_tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {
                "s": {"type": "string"}, "t": {"type": "string"}, "i": {"type": "integer"},
                "n": {"type": "number"}, "b": {"type": "boolean"}, "a": {"type": "array"},
                "o": {"type": "object"}, "z": {"type": ["string", "null"]},
            }}}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ])
}
