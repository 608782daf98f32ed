//! Parses replies in the formats of `inference-text`.
//!
//! The parser passes on a call while the model writes it. A malformed call becomes content. If the
//! client has already received a part of the call, it receives [`Delta::CallBroken`], and the
//! arguments stay incomplete.

use std::sync::Arc;

use inference::{ChatPrompt, Grammar, PreparedPrompt, StopCause, Token};
use inference_text::reply::{self, Event, Family, Format, ParserOptions, TokenReader, Tools};
use serde_json::Value;

use super::{CallOrJson, Delta, ReasoningMarks, ReplyFormat, ReplyParser, ReplyRequest, forced};

/// The reply format of a model, found from its chat template.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DetectedFormat(Format);

impl DetectedFormat {
    /// Detects the format from a chat template. `model_type` comes from the model's configuration.
    /// It decides if the template does not show how the model writes calls.
    #[must_use]
    pub fn detect(template: &str, model_type: &str) -> Self {
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
    /// Always true: if the template shows no call format, the prompt describes one to the model.
    fn reads_tools(&self) -> bool {
        true
    }

    fn reads_reasoning(&self) -> bool {
        self.0.has_reasoning()
    }

    fn written(
        &self,
        prompt: &ChatPrompt,
        prepare: &dyn Fn(&ChatPrompt) -> inference::Result<PreparedPrompt>,
    ) -> inference::Result<PreparedPrompt> {
        reply::written(self.0, prompt, prepare)
    }

    fn parser(&self, request: &ReplyRequest) -> Box<dyn ReplyParser> {
        let format = match request.tools.is_empty() {
            true => self.0.without_calls(),
            false => self.0.with_calls(),
        };
        let options = ParserOptions::default()
            .with_tools(tools(request))
            .with_prompt_tail(request.prompt_end.clone());
        Box::new(Reader {
            tokens: TokenReader::new(format, options),
            open: None,
            calls: 0,
            broken: 0,
            one_call: request.one_call,
        })
    }

    fn reasoning_marks(&self, request: &ReplyRequest) -> Option<ReasoningMarks> {
        if self.0.family == Family::Harmony {
            let mut marks = ReasoningMarks::new("<|channel|>analysis<|message|>", "<|end|>");
            marks.anywhere = true;
            marks.last_ending =
                String::from("<|end|><|start|>assistant<|channel|>final<|message|>");
            // With tools, the ending names no channel, because calls and answers have different
            // channels. The model chooses one of them.
            marks.ending = match request.tools.is_empty() {
                true => marks.last_ending.clone(),
                false => String::from("<|end|><|start|>assistant"),
            };
            return Some(marks);
        }
        let tags = self.0.reasoning?;
        let mut marks = ReasoningMarks::new(tags.open, tags.close);
        marks.anywhere = tags.anywhere;
        marks.is_open = tags.is_open_at_end_of(&request.prompt_end);
        Some(marks)
    }

    fn forced_call(&self, request: &ReplyRequest, named: Option<&str>) -> Result<Grammar, String> {
        forced::grammar(
            self.0.with_calls(),
            &Arc::new(tools(request)),
            request,
            named,
        )
    }

    fn call_or_json(&self, request: &ReplyRequest, schema: &Value) -> Result<CallOrJson, String> {
        forced::or_json(self.0.with_calls(), &tools(request), request, schema)
    }
}

/// Converts events of `inference-text` to deltas.
struct Reader {
    tokens: TokenReader,
    /// Index of the call that is being written.
    open: Option<usize>,
    /// Number of calls passed on so far.
    calls: usize,
    /// Number of those calls that were malformed.
    broken: usize,
    one_call: bool,
}

impl Reader {
    fn deltas(&mut self, events: Vec<Event>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for event in events {
            match event {
                Event::Content(text) => deltas.push(Delta::Content(text)),
                Event::Reasoning(text) => deltas.push(Delta::Reasoning(text)),
                Event::CallStarted { id, name, .. } => {
                    if self.one_call && self.calls > self.broken {
                        tracing::debug!("a second tool call is dropped, as the client asked");
                        continue;
                    }
                    let index = self.calls;
                    self.calls += 1;
                    self.open = Some(index);
                    deltas.push(Delta::ToolCall { index, id, name });
                }
                Event::ArgumentsDelta { delta: json, .. } => {
                    let more = |index| Delta::Arguments { index, json };
                    deltas.extend(self.open.map(more));
                }
                Event::CallEnded { .. } => {
                    let ended = |index| Delta::CallEnded { index };
                    deltas.extend(self.open.take().map(ended));
                }
                Event::Malformed(diagnosis) => {
                    tracing::warn!("a tool call is passed on as text: {diagnosis}");
                    self.take_back(&mut deltas);
                }
                // Later versions of `inference-text` may add event kinds.
                other => tracing::debug!(?other, "not passed on"),
            }
        }
        deltas
    }

    /// Ends the open call as malformed. If the call started in `deltas`, this removes the call's
    /// deltas. Otherwise the client already has a part of the call, so this appends `CallBroken`.
    fn take_back(&mut self, deltas: &mut Vec<Delta>) {
        let Some(open) = self.open.take() else { return };
        let begins =
            |delta: &Delta| matches!(delta, Delta::ToolCall { index, .. } if *index == open);
        if let Some(at) = deltas.iter().position(begins) {
            deltas.truncate(at);
            self.calls -= 1;
        } else {
            self.broken += 1;
            deltas.push(Delta::CallBroken { index: open });
        }
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
        let format = DetectedFormat::from(Format::for_family(Family::Lfm2));
        let mut parser = format.parser(&request());
        let mut deltas = parser.feed(&Token::new(1, "so "));
        deltas.extend(parser.feed(&special(2, "<|tool_call_start|>")));
        assert_eq!(content(&deltas), "so");
        let mut deltas = parser.feed(&Token::new(3, "[f(a=1"));
        // The special token flushes the withheld bytes, which precede it.
        let mut end = special(4, "<|tool_call_end|>");
        end.text = String::from(")]");
        deltas.extend(parser.feed(&end));
        assert!(matches!(&deltas[0], Delta::ToolCall { index: 0, name, .. } if name == "f"));
        assert_eq!(deltas.pop(), Some(Delta::CallEnded { index: 0 }));
        let json = |delta: &Delta| match delta {
            Delta::Arguments { index: 0, json } => json.clone(),
            other => panic!("{other:?}"),
        };
        let json: String = deltas[1..].iter().map(json).collect();
        assert_eq!(json, r#"{"a": 1}"#);
        assert_eq!(parser.feed(&special(5, "<|im_end|>")), []);
        assert_eq!(parser.finish(None), []);
    }

    #[test]
    fn a_malformed_call_is_content_and_leaves_no_gap() {
        let format = DetectedFormat::from(Format::for_family(Family::Hermes));
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
    fn parts_are_passed_on_at_once_and_a_malformed_rest_is_told() {
        let format = DetectedFormat::from(Format::for_family(Family::Hermes));
        let mut request = request();
        request.one_call = true;
        let mut parser = format.parser(&request);
        let mut feed = |text: &str| parser.feed(&Token::new(1, text));
        assert_eq!(content(&feed("So. ")), "So.");
        let deltas = feed(r#"<tool_call>{"name": "f", "arguments": {"a": "#);
        let json = String::from(r#"{"a": "#);
        assert!(matches!(&deltas[0], Delta::ToolCall { index: 0, name, .. } if name == "f"));
        assert_eq!(deltas[1..], [Delta::Arguments { index: 0, json }]);
        let json = String::from("1");
        assert_eq!(feed("1"), [Delta::Arguments { index: 0, json }]);
        let deltas = feed("]");
        assert_eq!(deltas[0], Delta::CallBroken { index: 0 });
        let text = r#" <tool_call>{"name": "f", "arguments": {"a": 1]"#;
        assert_eq!(content(&deltas[1..]), text);
        // With `one_call`, only complete calls count, so the first well-formed call is the result.
        let deltas = feed(r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#);
        assert!(matches!(&deltas[0], Delta::ToolCall { index: 1, name, .. } if name == "g"));
        assert_eq!(deltas.last(), Some(&Delta::CallEnded { index: 1 }));
        assert_eq!(
            feed(r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#),
            []
        );
    }

    #[test]
    fn without_tools_a_call_is_content() {
        let format = DetectedFormat::from(Format::for_family(Family::Hermes));
        let mut parser = format.parser(&ReplyRequest::default());
        let text = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
        let mut deltas = parser.feed(&Token::new(1, text));
        deltas.extend(parser.finish(None));
        assert_eq!(content(&deltas), text);
    }
}
