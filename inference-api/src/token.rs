//! The output of a model: tokens, streams of them, and the results of calls over many prompts.

use std::iter::FusedIterator;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::metrics::GenerateMetrics;

/// One generated token.
///
/// `text` may be empty while a multi-byte character or a possible stop string is pending. The texts
/// of a stream, one after another, are the output.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The number in the vocabulary.
    pub id: u32,
    /// The text it adds to the output.
    pub text: String,
    /// The bytes of this token alone, which may be a part of a character. For a special token it is
    /// its name in the vocabulary. `None` where the backend does not say.
    pub bytes: Option<Box<[u8]>>,
    /// Whether this is a special token. `text` then lacks its name, which is not part of the
    /// output.
    pub special: bool,
    /// The logits from which the token was chosen, one per token of the vocabulary, if requested.
    pub logits: Option<Arc<[f32]>>,
    /// The log-probabilities of the token and of the alternatives, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities under the model's own distribution: before penalties,
/// biases, grammars, filters and temperature. The minimum is -9999, which stands for probability 0.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The log-probability of the chosen token.
    pub logprob: f32,
    /// The most probable tokens, the first the most probable.
    pub top: Vec<TopLogprob>,
}

/// One of the most probable tokens.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The number in the vocabulary.
    pub id: u32,
    /// The text of this token alone; U+FFFD stands for parts of a character.
    pub text: String,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The bytes of this token alone. `None` where the backend does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Box<[u8]>>,
}

impl TokenLogprobs {
    /// What a token had, and the most probable ones.
    #[must_use]
    pub fn new(logprob: f32, top: Vec<TopLogprob>) -> Self {
        Self { logprob, top }
    }
}

impl TopLogprob {
    /// One alternative.
    pub fn new(id: u32, text: impl Into<String>, logprob: f32) -> Self {
        Self {
            id,
            text: text.into(),
            logprob,
            bytes: None,
        }
    }

    /// Adds the text of this token alone.
    #[must_use]
    pub fn with_bytes(mut self, bytes: impl Into<Box<[u8]>>) -> Self {
        self.bytes = Some(bytes.into());
        self
    }
}

impl Token {
    /// A token without logits.
    pub fn new(id: u32, text: impl Into<String>) -> Self {
        Self {
            id,
            text: text.into(),
            bytes: None,
            special: false,
            logits: None,
            logprobs: None,
        }
    }

    /// Adds the text of this token alone.
    #[must_use]
    pub fn with_bytes(mut self, bytes: impl Into<Box<[u8]>>) -> Self {
        self.bytes = Some(bytes.into());
        self
    }

    /// Sets whether it is a special token.
    #[must_use]
    pub fn with_special(mut self, special: bool) -> Self {
        self.special = special;
        self
    }

    /// Adds how probable it was.
    #[must_use]
    pub fn with_logprobs(mut self, logprobs: TokenLogprobs) -> Self {
        self.logprobs = Some(logprobs);
        self
    }

    /// Adds the logits it was drawn from.
    #[must_use]
    pub fn with_logits(mut self, logits: impl Into<Arc<[f32]>>) -> Self {
        self.logits = Some(logits.into());
        self
    }
}

/// Why a reply ended.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model's end-of-text token, a stop token or a stop string.
    Stop,
    /// The most tokens asked for, or the end of the context.
    Length,
    /// The caller cancelled, or dropped the stream.
    Cancelled,
    /// The deadline passed.
    Deadline,
    /// The engine failed.
    Error,
}

impl FinishReason {
    /// The name as JSON has it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Deadline => "deadline",
            FinishReason::Error => "error",
        }
    }
}

impl FinishReason {
    /// How a reply ends that fails with `error`.
    #[must_use]
    pub fn of_error(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Cancelled => FinishReason::Cancelled,
            ErrorKind::DeadlineExceeded => FinishReason::Deadline,
            _ => FinishReason::Error,
        }
    }
}

impl std::fmt::Display for FinishReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What ended a reply whose [`FinishReason`] is [`FinishReason::Stop`].
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopCause {
    /// The model's end-of-text token, or one of them.
    Eos(u32),
    /// One of [`StopOptions::stop_tokens`](crate::StopOptions::stop_tokens).
    Token(u32),
    /// One of [`StopOptions::stop_strings`](crate::StopOptions::stop_strings).
    String(String),
}

/// What a backend implements to give a [`TokenStream`].
pub trait TokenSource: Iterator<Item = Result<Token>> + Send {
    /// Why the reply ended; `None` while it goes on.
    fn finish_reason(&self) -> Option<FinishReason>;

    /// What stopped the reply, once it ended with [`FinishReason::Stop`]; `None` where the backend
    /// does not say.
    fn stop_cause(&self) -> Option<StopCause> {
        None
    }

    /// The figures of this request so far.
    fn metrics(&self) -> GenerateMetrics;
}

/// A reply during generation: an iterator of tokens. It ends after an error, and dropping it
/// cancels the request.
///
/// Cancellation and deadlines show as one error of kind [`crate::ErrorKind::Cancelled`] or
/// [`crate::ErrorKind::DeadlineExceeded`].
pub struct TokenStream {
    source: Box<dyn TokenSource>,
    ended: bool,
    /// What an error says about the end, for a source that says nothing itself.
    failure: Option<FinishReason>,
}

/// A whole reply.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// The text.
    pub text: String,
    /// The ids of its tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish_reason: Option<FinishReason>,
    /// The metrics.
    pub metrics: GenerateMetrics,
}

impl TokenStream {
    /// A stream of `source`.
    pub fn new(source: impl TokenSource + 'static) -> Self {
        Self {
            source: Box::new(source),
            ended: false,
            failure: None,
        }
    }

    /// Why the reply ended; `None` while it goes on.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.source.finish_reason().or(self.failure)
    }

    /// What stopped the reply, once it ended with [`FinishReason::Stop`]; `None` where the backend
    /// does not say.
    #[must_use]
    pub fn stop_cause(&self) -> Option<StopCause> {
        self.source.stop_cause()
    }

    /// The figures of this request so far.
    #[must_use]
    pub fn metrics(&self) -> GenerateMetrics {
        self.source.metrics()
    }

    /// Runs to the end and returns the text.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn text(self) -> Result<String> {
        Ok(self.collect_output()?.text)
    }

    /// Runs to the end and returns text, ids and figures.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn collect_output(mut self) -> Result<Output> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for token in self.by_ref() {
            let token = token?;
            text.push_str(&token.text);
            tokens.push(token.id);
        }
        Ok(Output {
            text,
            tokens,
            finish_reason: self.finish_reason(),
            metrics: self.metrics(),
        })
    }
}

impl Iterator for TokenStream {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        if self.ended {
            return None;
        }
        let item = self.source.next();
        self.ended = !matches!(item, Some(Ok(_)));
        if let Some(Err(e)) = &item {
            self.failure = Some(FinishReason::of_error(e));
        }
        item
    }
}

impl FusedIterator for TokenStream {}

impl std::fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenStream")
            .field("finish_reason", &self.finish_reason())
            .finish()
    }
}

/// The next token of one prompt.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub struct ClassifyResult {
    /// The token drawn.
    pub token: Token,
    /// The logits of the whole vocabulary, where asked for.
    pub logits: Option<Vec<f32>>,
}

impl ClassifyResult {
    /// A result.
    #[must_use]
    pub fn new(token: Token, logits: Option<Vec<f32>>) -> Self {
        Self { token, logits }
    }
}

/// The reply to one prompt of several.
#[non_exhaustive]
#[derive(Debug, Clone)]
pub struct BatchResult {
    /// The tokens, up to the error where there was one.
    pub tokens: Vec<Token>,
    /// Why it ended.
    pub finish_reason: Option<FinishReason>,
    /// The error of this prompt; the others are not affected.
    pub error: Option<Error>,
}

impl BatchResult {
    /// A complete reply.
    #[must_use]
    pub fn new(tokens: Vec<Token>, finish_reason: Option<FinishReason>) -> Self {
        Self {
            tokens,
            finish_reason,
            error: None,
        }
    }

    /// A reply that failed after `tokens`.
    #[must_use]
    pub fn failed(tokens: Vec<Token>, error: Error) -> Self {
        Self {
            tokens,
            finish_reason: Some(FinishReason::of_error(&error)),
            error: Some(error),
        }
    }

    /// The text of its tokens.
    #[must_use]
    pub fn text(&self) -> String {
        self.tokens.iter().map(|t| t.text.as_str()).collect()
    }
}
