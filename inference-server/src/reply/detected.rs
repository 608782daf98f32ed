//! Replies in the formats of `inference-text`.
//!
//! A call is passed on when it is complete: a malformed call becomes content, and a client cannot
//! take back received parts.

use std::sync::Arc;

use inference::{Grammar, StopCause, Token};
use inference_text::reply::{Event, Format, ParserOptions, TokenReader, Tools};

use super::{Delta, ReplyFormat, ReplyParser, ReplyRequest, forced};

/// How a model writes replies, as its chat template tells.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DetectedFormat(Format);

impl DetectedFormat {
    /// The format of a chat template. `model_type` is the configuration's, for templates that do
    /// not show how the model writes calls.
    #[must_use]
    pub fn of(template: &str, model_type: &str) -> Self {
        Self(Format::detect(template, Some(model_type)))
    }
}

impl From<Format> for DetectedFormat {
    fn from(format: Format) -> Self {
        Self(format)
    }
}

impl std::fmt::Display for DetectedFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let family = self.0.family;
        match self.0.has_reasoning() {
            true => write!(f, "{family} with reasoning"),
            false => write!(f, "{family}"),
        }
    }
}

fn tools(request: &ReplyRequest) -> Tools {
    Tools::from(request.tools.as_slice())
}

impl ReplyFormat for DetectedFormat {
    fn reads_tools(&self) -> bool {
        self.0.has_tool_calls()
    }

    fn reads_reasoning(&self) -> bool {
        self.0.has_reasoning()
    }

    fn parser(&self, request: &ReplyRequest) -> Box<dyn ReplyParser> {
        let format = match request.tools.is_empty() {
            true => self.0.without_calls(),
            false => self.0,
        };
        let options = ParserOptions::default()
            .with_tools(tools(request))
            .with_prompt_tail(request.prompt_end.clone());
        Box::new(Reader {
            tokens: TokenReader::new(format, options),
            open: None,
            calls: 0,
            one_call: request.one_call,
        })
    }

    fn forced_call(&self, request: &ReplyRequest, named: Option<&str>) -> Result<Grammar, String> {
        forced::grammar(self.0, &Arc::new(tools(request)), request, named)
    }
}

/// Events of `inference-text` as deltas.
struct Reader {
    tokens: TokenReader,
    open: Option<Open>,
    /// Calls that were passed on.
    calls: usize,
    one_call: bool,
}

/// A call that is not complete yet.
struct Open {
    id: String,
    name: String,
    arguments: String,
}

impl Reader {
    fn deltas(&mut self, events: Vec<Event>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for event in events {
            match event {
                Event::Content(text) => deltas.push(Delta::Content(text)),
                Event::Reasoning(text) => deltas.push(Delta::Reasoning(text)),
                Event::CallStarted { id, name, .. } => {
                    self.open = Some(Open {
                        id,
                        name,
                        arguments: String::new(),
                    });
                }
                Event::ArgumentsDelta { delta, .. } => {
                    if let Some(open) = &mut self.open {
                        open.arguments.push_str(&delta);
                    }
                }
                Event::CallEnded { .. } => self.close(&mut deltas),
                Event::Malformed(diagnosis) => {
                    self.open = None;
                    tracing::warn!("a tool call is passed on as text: {diagnosis}");
                }
                // Later kinds of events.
                other => tracing::debug!(?other, "not passed on"),
            }
        }
        deltas
    }

    /// Passes the open call on, under the next index: calls that were malformed leave no gap.
    fn close(&mut self, deltas: &mut Vec<Delta>) {
        let Some(Open {
            id,
            name,
            arguments,
        }) = self.open.take()
        else {
            return;
        };
        if self.one_call && self.calls > 0 {
            tracing::debug!("a second tool call is dropped, as the client asked");
            return;
        }
        let index = self.calls;
        self.calls += 1;
        deltas.push(Delta::ToolCall { index, id, name });
        deltas.push(Delta::Arguments {
            index,
            json: arguments,
        });
    }
}

impl ReplyParser for Reader {
    fn feed(&mut self, token: &Token) -> Vec<Delta> {
        let events = self.tokens.feed(token);
        self.deltas(events)
    }

    fn finish(&mut self, _: Option<&StopCause>) -> Vec<Delta> {
        let events = self.tokens.finish();
        self.deltas(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference::Tool;
    use inference_text::reply::Family;

    fn request() -> ReplyRequest {
        ReplyRequest {
            tools: vec![Tool::new("f", None), Tool::new("g", None)],
            ..ReplyRequest::default()
        }
    }

    fn content(deltas: &[Delta]) -> String {
        let text = deltas.iter().map(|delta| match delta {
            Delta::Content(text) => text.as_str(),
            other => panic!("{other:?}"),
        });
        text.collect()
    }

    fn special(id: u32, name: &str) -> Token {
        Token::new(id, "")
            .with_bytes(name.as_bytes())
            .with_special(true)
    }

    #[test]
    fn special_tokens_are_markers_and_no_content() {
        let format = DetectedFormat::from(Format::of(Family::Lfm2));
        let mut parser = format.parser(&request());
        let mut deltas = parser.feed(&Token::new(1, "so "));
        deltas.extend(parser.feed(&special(2, "<|tool_call_start|>")));
        assert_eq!(content(&deltas), "so");
        assert_eq!(parser.feed(&Token::new(3, "[f(a=1")), []);
        // Bytes that waited come with the special token and stand before it.
        let mut end = special(4, "<|tool_call_end|>");
        end.text = String::from(")]");
        let deltas = parser.feed(&end);
        assert!(matches!(&deltas[0], Delta::ToolCall { index: 0, name, .. } if name == "f"));
        let json = String::from(r#"{"a": 1}"#);
        assert_eq!(deltas[1..], [Delta::Arguments { index: 0, json }]);
        assert_eq!(parser.feed(&special(5, "<|im_end|>")), []);
        assert_eq!(parser.finish(None), []);
    }

    #[test]
    fn a_malformed_call_is_content_and_leaves_no_gap() {
        let format = DetectedFormat::from(Format::of(Family::Hermes));
        let mut parser = format.parser(&request());
        let bad = r#"<tool_call>{"name": "f", "arguments": {"a": 1]"#;
        let deltas = parser.feed(&Token::new(1, bad));
        assert_eq!(content(&deltas), bad);
        let good = r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#;
        let deltas = parser.feed(&Token::new(2, good));
        assert!(
            matches!(&deltas[0], Delta::ToolCall { index: 0, name, .. } if name == "g"),
            "{deltas:?}"
        );
    }

    #[test]
    fn without_tools_a_call_is_content() {
        let format = DetectedFormat::from(Format::of(Family::Hermes));
        let mut parser = format.parser(&ReplyRequest::default());
        let text = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
        let mut deltas = parser.feed(&Token::new(1, text));
        deltas.extend(parser.finish(None));
        assert_eq!(content(&deltas), text);
    }
}
