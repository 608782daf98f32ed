//! Replies that are either tool calls or JSON of a schema. The first character after the lead tells
//! the two apart. JSON is passed on unparsed, because its strings may contain marks of calls.

use inference::{Grammar, StopCause, Token};
use inference_text::reply::JsonStart;

use super::{Delta, ReplyParser};

/// A grammar for replies that are either calls or JSON, and the data for reading such a reply.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub struct CallOrJson {
    /// The grammar.
    pub grammar: Grammar,
    /// The text before the call or the JSON, which is not part of the answer.
    pub lead: String,
    /// The first characters of the JSON. No call begins with one of them.
    pub start: JsonStart,
}

/// Reads a reply that is either calls or JSON.
pub(crate) struct Either {
    lead: String,
    start: JsonStart,
    calls: Box<dyn ReplyParser>,
    state: State,
}

enum State {
    /// The reply so far is a part of the lead or white space.
    Undecided {
        tokens: Vec<Token>,
        text: String,
    },
    Calls,
    Json,
}

/// The kind of the text so far.
enum Verdict {
    Open,
    Calls,
    /// JSON, from this byte on.
    Json(usize),
}

impl Either {
    /// `calls` parses replies that are calls.
    pub(crate) fn new(either: &CallOrJson, calls: Box<dyn ReplyParser>) -> Self {
        Self {
            lead: either.lead.clone(),
            start: either.start,
            calls,
            state: State::Undecided {
                tokens: Vec::new(),
                text: String::new(),
            },
        }
    }

    fn verdict(&self, text: &str) -> Verdict {
        let Some(rest) = text.strip_prefix(self.lead.as_str()) else {
            return match self.lead.starts_with(text) {
                true => Verdict::Open,
                false => Verdict::Calls,
            };
        };
        match rest.char_indices().find(|(_, c)| !c.is_whitespace()) {
            None => Verdict::Open,
            Some((at, c)) if self.start.allows(c) => Verdict::Json(self.lead.len() + at),
            Some(_) => Verdict::Calls,
        }
    }
}

impl ReplyParser for Either {
    fn feed(&mut self, token: &Token) -> Vec<Delta> {
        let content = |text: &str| match text {
            "" => Vec::new(),
            text => vec![Delta::Content(text.to_owned())],
        };
        let (mut tokens, mut text) = match &mut self.state {
            State::Calls => return self.calls.feed(token),
            State::Json => return content(&token.text),
            State::Undecided { tokens, text } => (std::mem::take(tokens), std::mem::take(text)),
        };
        text.push_str(&token.text);
        // The text of a special token, such as a closing mark of reasoning, is in its bytes.
        if token.special
            && let Some(name) = &token.bytes
        {
            text.push_str(&String::from_utf8_lossy(name));
        }
        tokens.push(token.clone());
        match self.verdict(&text) {
            Verdict::Open => {
                self.state = State::Undecided { tokens, text };
                Vec::new()
            }
            Verdict::Calls => {
                self.state = State::Calls;
                let calls = &mut self.calls;
                tokens.iter().flat_map(|token| calls.feed(token)).collect()
            }
            Verdict::Json(at) => {
                self.state = State::Json;
                content(text.get(at..).unwrap_or_default())
            }
        }
    }

    fn finish(&mut self, stop: Option<&StopCause>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        match &mut self.state {
            State::Json => return deltas,
            State::Calls => {}
            State::Undecided { tokens, .. } => {
                let calls = &mut self.calls;
                deltas.extend(tokens.drain(..).flat_map(|token| calls.feed(&token)));
            }
        }
        deltas.extend(self.calls.finish(stop));
        deltas
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::{DetectedFormat, ReplyFormat, ReplyRequest};
    use inference::Tool;
    use inference_text::reply::{Family, Format, ReasoningTags};
    use serde_json::json;

    fn either(open: bool) -> Either {
        let format = Format::for_family(Family::Hermes).with_reasoning(ReasoningTags::THINK);
        let mut request = ReplyRequest {
            tools: vec![Tool::new("f", None)],
            ..ReplyRequest::default()
        };
        if open {
            request.prompt_end = String::from("<think>\n");
        }
        let format = DetectedFormat::from(format);
        let either = format.call_or_json(&request, &json!({"type": "object"}));
        Either::new(&either.unwrap(), format.parser(&request))
    }

    /// Parses tokens. Returns the joined content, the joined reasoning and the number of calls.
    fn deltas(mut parser: Either, pieces: &[Token]) -> (String, String, usize) {
        let mut all: Vec<Delta> = pieces.iter().flat_map(|t| parser.feed(t)).collect();
        all.extend(parser.finish(None));
        let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), 0);
        for delta in all {
            match delta {
                Delta::Content(text) => content += &text,
                Delta::Reasoning(text) => reasoning += &text,
                Delta::CallEnded { .. } => calls += 1,
                _ => {}
            }
        }
        (content, reasoning, calls)
    }

    #[test]
    fn json_is_not_parsed_and_a_call_is() {
        let json = r#"{"a": "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"}"#;
        let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
        for open in [false, true] {
            let lead = if open { "</think>\n\n" } else { "" };
            for (text, content, calls) in [(json, json, 0), (call, "", 1)] {
                let text = format!("{lead}{text}");
                let each = |c: char| Token::new(1, String::from(c));
                let whole = [Token::new(1, text.clone())];
                let single: Vec<Token> = text.chars().map(each).collect();
                for tokens in [&whole[..], &single] {
                    let read = deltas(either(open), tokens);
                    assert_eq!(read, (content.into(), String::new(), calls), "{text}");
                }
            }
        }
    }

    #[test]
    fn the_lead_may_be_a_special_token() {
        let mark = Token::new(1, "")
            .with_bytes("</think>".as_bytes())
            .with_special(true);
        let tokens = [mark, Token::new(2, "\n\n{"), Token::new(3, "}")];
        let read = deltas(either(true), &tokens);
        assert_eq!(read, ("{}".into(), String::new(), 0));
    }

    #[test]
    fn a_reply_that_ends_before_the_decision_is_parsed() {
        let read = deltas(either(true), &[Token::new(1, "</thi")]);
        assert_eq!(read, (String::new(), "</thi".into(), 0));
        // A reply without the lead is read like any other.
        let read = deltas(either(true), &[Token::new(1, "hm</think>\n\nyes")]);
        assert_eq!(read, ("yes".into(), "hm".into(), 0));
    }
}
