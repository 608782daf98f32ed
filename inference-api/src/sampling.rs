//! Constraints on tokens that are not plain numbers: grammars, and logits processors written in
//! Rust. Each backend implements its own sampling. The numeric options are in
//! [`GenerateOptions`](crate::GenerateOptions).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::grammar_limits;

/// A grammar for a reply. Only tokens that can lead to a matching reply are drawn.
///
/// A reply that ends with [`FinishReason::Stop`](crate::FinishReason::Stop) by the model's
/// end-of-text token matches completely. A truncated reply is a prefix of a matching text.
/// `max_tokens`, a stop string, a stop token, a deadline or a cancellation can truncate a reply.
///
/// A grammar above these limits is refused before it is compiled:
///
/// - A schema: 1 MiB, 100,000 values, 128 levels of nesting, 2,000 members in an object, and 2,000
///   elements in an array (10,000 in an `enum`).
/// - References of a schema: 1,000 different targets of `$ref`, with 4,096 levels of nesting in
///   total.
/// - Patterns of a schema: 4,096 bytes each, 64 `patternProperties`, and 10 patterns or formats
///   that one string must match at once. Bounds such as `maxItems` are at most 2,147,483,647.
/// - A regular expression: 256 KiB.
/// - A Lark grammar: 128 KiB, 4,000 colons, and 10 intersections (`&`).
///
/// In JSON: `{"json_schema": {"type": "object"}}`, `{"regex": "yes|no"}` or
/// `{"lark": "start: ..."}`.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON value that this schema allows. `{}` (or `true`) allows every JSON value.
    JsonSchema(serde_json::Value),
    /// A text that matches this regular expression completely, in the syntax of Rust's `regex`
    /// crate.
    Regex(String),
    /// A text of this context-free grammar, in Lark's syntax, that begins at the rule `start`.
    Lark(String),
}

impl Grammar {
    /// Creates a grammar that accepts any JSON object.
    #[must_use]
    pub fn json_object() -> Self {
        Grammar::JsonSchema(serde_json::json!({"type": "object"}))
    }

    /// The schema in `text`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the text is not JSON or exceeds the size limit of a schema.
    pub fn from_json_schema(text: &str) -> Result<Self> {
        if text.len() > grammar_limits::SCHEMA_BYTES {
            return Err(invalid(format!(
                "the JSON schema has {} bytes; at most {} are allowed",
                text.len(),
                grammar_limits::SCHEMA_BYTES
            )));
        }
        text.parse()
            .map(Grammar::JsonSchema)
            .map_err(|e| invalid(String::from("the JSON schema is not JSON")).with_source(e))
    }

    /// `json_schema`, `regex` or `lark`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Grammar::JsonSchema(_) => "json_schema",
            Grammar::Regex(_) => "regex",
            Grammar::Lark(_) => "lark",
        }
    }

    /// Checks everything that needs no vocabulary, starting with the size. The engine checks the
    /// rest when a request starts.
    ///
    /// A value built by a program may be nested deeper than any parsed text. Call this check before
    /// any recursive operation on the value, such as a clone. The check itself does not recurse.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the fault. For an exceeded limit, the message names the
    /// limit and a JSON pointer.
    pub fn validate(&self) -> Result<()> {
        match self {
            Grammar::JsonSchema(value) => grammar_limits::check_schema(value)?,
            Grammar::Regex(text) => grammar_limits::check_regex(text)?,
            Grammar::Lark(text) => grammar_limits::check_lark(text)?,
        }
        match self {
            Grammar::JsonSchema(value) if !value.is_object() && !value.is_boolean() => {
                Err(invalid(format!(
                    "the JSON schema is {}; it must be an object, or true for any JSON",
                    match value {
                        serde_json::Value::Null => "null",
                        serde_json::Value::Number(_) => "a number",
                        serde_json::Value::String(_) => "a string",
                        _ => "an array",
                    }
                )))
            }
            Grammar::JsonSchema(serde_json::Value::Bool(false)) => Err(invalid(
                "the JSON schema is false, which allows nothing; use true for any JSON".into(),
            )),
            Grammar::Lark(text) if text.trim().is_empty() => Err(invalid(
                "the Lark grammar is empty; it must have a rule `start`".into(),
            )),
            _ => Ok(()),
        }
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Changes logits before a token is drawn, for cases that no option covers.
///
/// For such a request, the engine copies the logits to the host at each step, and waits for each
/// token before the next step. All other [`GenerateOptions`](crate::GenerateOptions) stay on the
/// device. Therefore use a processor only if no option suffices.
pub trait LogitsProcessor: Send {
    /// Changes `logits` in place. There is one logit per token of the vocabulary; minus infinity
    /// forbids a token. `prompt` and `reply` are the token ids so far. Penalties and biases apply
    /// before the processor. Banned tokens and the grammar apply after it, so the processor cannot
    /// allow a token that they forbid.
    ///
    /// # Errors
    /// Any error ends the reply with that error.
    fn process(&mut self, prompt: &[u32], reply: &[u32], logits: &mut [f32]) -> Result<()>;
}

impl<F> LogitsProcessor for F
where
    F: FnMut(&[u32], &[u32], &mut [f32]) -> Result<()> + Send,
{
    fn process(&mut self, prompt: &[u32], reply: &[u32], logits: &mut [f32]) -> Result<()> {
        self(prompt, reply, logits)
    }
}

/// Creates a [`LogitsProcessor`] for each reply. So one set of options can serve several concurrent
/// requests, and each processor may have its own state.
#[derive(Clone)]
pub struct LogitsProcessorFactory(Arc<dyn Fn() -> Box<dyn LogitsProcessor> + Send + Sync>);

impl LogitsProcessorFactory {
    /// A factory that calls `make` at the start of each reply.
    pub fn new<P, F>(make: F) -> Self
    where
        P: LogitsProcessor + 'static,
        F: Fn() -> P + Send + Sync + 'static,
    {
        Self(Arc::new(move || Box::new(make())))
    }

    /// Creates a processor for one reply.
    #[must_use]
    pub fn make(&self) -> Box<dyn LogitsProcessor> {
        (self.0)()
    }
}

impl fmt::Debug for LogitsProcessorFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogitsProcessorFactory")
    }
}

/// A logit bias in text form: `15=-2.5` or `15:-2.5`, or llama.cpp's `15-1` or `15+1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub id: u32,
    /// The value added to its logit.
    pub bias: f32,
}

impl FromStr for LogitBias {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            invalid(format!(
                "logit bias `{text}` is not ID=BIAS, such as 15043=1.5 or 15043=-2"
            ))
        };
        let at = text.find(['=', ':', '+', '-']).ok_or_else(bad)?;
        let (id, rest) = text.split_at(at);
        let value = rest.strip_prefix(['=', ':']).unwrap_or(rest);
        let bias: f32 = value.trim().parse().map_err(|_| bad())?;
        let id = id.trim().parse().map_err(|_| bad())?;
        if !bias.is_finite() {
            return Err(bad());
        }
        Ok(Self { id, bias })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grammars_are_tagged_json() {
        for (grammar, json) in [
            (
                Grammar::json_object(),
                r#"{"json_schema":{"type":"object"}}"#,
            ),
            (Grammar::Regex("a|b".into()), r#"{"regex":"a|b"}"#),
            (
                Grammar::Lark("start: \"a\"".into()),
                r#"{"lark":"start: \"a\""}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&grammar).unwrap(), json);
            assert_eq!(serde_json::from_str::<Grammar>(json).unwrap(), grammar);
            assert!(json.contains(grammar.kind()));
            grammar.validate().unwrap();
        }
        assert!(serde_json::from_str::<Grammar>(r#"{"gbnf":"x"}"#).is_err());
    }

    #[test]
    fn what_is_no_schema_is_refused() {
        for text in ["[1]", "3", "\"object\"", "null", "false"] {
            let grammar = Grammar::from_json_schema(text).unwrap();
            let e = grammar.validate().unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidOption, "{text}");
        }
        let e = Grammar::from_json_schema("{").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
        assert!(Grammar::Lark(" \n".into()).validate().is_err());
        Grammar::from_json_schema("true")
            .unwrap()
            .validate()
            .unwrap();
    }

    #[test]
    fn biases_are_read_in_every_spelling() {
        for (text, id, bias) in [
            ("15=2.5", 15, 2.5),
            ("15:-2.5", 15, -2.5),
            ("15+1", 15, 1.0),
            ("15-1e1", 15, -10.0),
            (" 7 = 3 ", 7, 3.0),
        ] {
            assert_eq!(text.parse::<LogitBias>().unwrap(), LogitBias { id, bias });
        }
        for text in [
            "", "15", "=1", "a=1", "15=", "15=x", "15=inf", "15=nan", "-1=2",
        ] {
            assert!(text.parse::<LogitBias>().is_err(), "{text}");
        }
    }

    #[test]
    fn each_reply_gets_its_own_processor() {
        let factory = LogitsProcessorFactory::new(|| {
            let mut calls = 0.0;
            move |_: &[u32], _: &[u32], logits: &mut [f32]| {
                calls += 1.0;
                logits[0] = calls;
                Ok(())
            }
        });
        let (mut a, mut b) = (factory.make(), factory.clone().make());
        let mut logits = [0.0; 2];
        a.process(&[], &[], &mut logits).unwrap();
        a.process(&[], &[], &mut logits).unwrap();
        assert_eq!(logits[0], 2.0);
        b.process(&[], &[], &mut logits).unwrap();
        assert_eq!(logits[0], 1.0);
    }
}
