//! The output of a model: tokens, streams of tokens, and results of calls with several prompts.

use std::iter::FusedIterator;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::metrics::GenerateMetrics;

/// One generated token.
///
/// `text` may be empty while a multi-byte character or a possible stop string is incomplete. The
/// output is the concatenation of all texts of a stream.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// The text that the token adds to the output.
    pub text: String,
    /// The bytes of this token alone, which may be a part of a character. A special token has the
    /// bytes of its name in the vocabulary. `None` if the backend does not report them.
    pub bytes: Option<Box<[u8]>>,
    /// Whether this is a special token. Its name is not part of the output, so `text` does not
    /// contain it.
    pub special: bool,
    /// The logits from which the token was chosen, one per token of the vocabulary, if requested.
    pub logits: Option<Arc<[f32]>>,
    /// The log-probabilities of the token and of the alternatives, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probabilities (natural logarithm) under the model's own distribution, before penalties,
/// biases, grammars, filters and temperature. The minimum is -9999, which represents probability 0.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The log-probability of the chosen token.
    pub logprob: f32,
    /// The most probable tokens, in descending order.
    pub top: Vec<TopLogprob>,
}

/// One of the most probable tokens, with its log-probability.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    /// The token's id in the vocabulary.
    pub id: u32,
    /// The text of this token alone. U+FFFD replaces incomplete characters.
    pub text: String,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The bytes of this token alone. `None` if the backend does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Box<[u8]>>,
}

impl TokenLogprobs {
    /// Creates a result from the log-probability of the chosen token and the most probable tokens.
    #[must_use]
    pub fn new(logprob: f32, top: Vec<TopLogprob>) -> Self {
        Self { logprob, top }
    }
}

impl TopLogprob {
    /// One of the most probable tokens, with its log-probability.
    pub fn new(id: u32, text: impl Into<String>, logprob: f32) -> Self {
        Self {
            id,
            text: text.into(),
            logprob,
            bytes: None,
        }
    }

    /// Sets the bytes of this token alone.
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

    /// Sets the bytes of this token alone.
    #[must_use]
    pub fn with_bytes(mut self, bytes: impl Into<Box<[u8]>>) -> Self {
        self.bytes = Some(bytes.into());
        self
    }

    /// Sets whether this is a special token.
    #[must_use]
    pub fn with_special(mut self, special: bool) -> Self {
        self.special = special;
        self
    }

    /// Sets the log-probabilities.
    #[must_use]
    pub fn with_logprobs(mut self, logprobs: TokenLogprobs) -> Self {
        self.logprobs = Some(logprobs);
        self
    }

    /// Sets the logits from which the token was chosen.
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
    /// The model's end-of-text token, a stop token or a stop string ended the reply.
    Stop,
    /// The reply reached the maximum number of tokens, or the end of the context.
    Length,
    /// The caller cancelled the request, or dropped the stream.
    Cancelled,
    /// The deadline passed.
    Deadline,
    /// The engine failed.
    Error,
}

impl FinishReason {
    /// The name in JSON.
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
    /// The finish reason of a reply that fails with `error`.
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
    /// One of the model's end-of-text tokens.
    Eos(u32),
    /// One of [`StopOptions::stop_tokens`](crate::StopOptions::stop_tokens).
    Token(u32),
    /// One of [`StopOptions::stop_strings`](crate::StopOptions::stop_strings).
    String(String),
}

/// The backend's side of a [`TokenStream`].
pub trait TokenSource: Iterator<Item = Result<Token>> + Send {
    /// Why the reply ended; `None` while it continues.
    fn finish_reason(&self) -> Option<FinishReason>;

    /// What stopped the reply, if it ended with [`FinishReason::Stop`]. `None` if the backend does
    /// not report it.
    fn stop_cause(&self) -> Option<StopCause> {
        None
    }

    /// The metrics of this request so far.
    fn metrics(&self) -> GenerateMetrics;
}

/// The tokens of a reply, as an iterator. The iterator ends after an error. Dropping it cancels the
/// request.
///
/// After a cancellation or a deadline, the stream returns one error of kind
/// [`crate::ErrorKind::Cancelled`] or [`crate::ErrorKind::DeadlineExceeded`].
pub struct TokenStream {
    source: Box<dyn TokenSource>,
    ended: bool,
    /// The finish reason that follows from an error, for a source that reports none itself.
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
    /// Why the reply ended.
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

    /// Why the reply ended; `None` while it continues.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.source.finish_reason().or(self.failure)
    }

    /// What stopped the reply, if it ended with [`FinishReason::Stop`]. `None` if the backend does
    /// not report it.
    #[must_use]
    pub fn stop_cause(&self) -> Option<StopCause> {
        self.source.stop_cause()
    }

    /// The metrics of this request so far.
    #[must_use]
    pub fn metrics(&self) -> GenerateMetrics {
        self.source.metrics()
    }

    /// Generates to the end, and returns the text.
    ///
    /// # Errors
    /// The first error of the stream.
    pub fn text(self) -> Result<String> {
        Ok(self.collect_output()?.text)
    }

    /// Generates to the end, and returns text, ids and metrics.
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
    /// The chosen token.
    pub token: Token,
    /// The logits of the whole vocabulary, if requested.
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
    /// The tokens. If there is an error, the tokens before it.
    pub tokens: Vec<Token>,
    /// Why the reply ended.
    pub finish_reason: Option<FinishReason>,
    /// The error of this prompt. Other prompts are not affected.
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
