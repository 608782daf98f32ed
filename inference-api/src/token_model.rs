//! Models with access to token ids and logits.

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{ChatPrompt, Prompt};
use crate::prompt::PreparedPrompt;

/// Logits of some positions of a prompt.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogitsOutput {
    /// The ids of the prompt.
    pub tokens: Vec<u32>,
    /// `[positions, vocab]`.
    pub shape: Vec<usize>,
    /// Row-major, one row per position.
    pub logits: Vec<f32>,
}

impl LogitsOutput {
    /// Creates logits of `shape` for the prompt `tokens`.
    #[must_use]
    pub fn new(tokens: Vec<u32>, shape: Vec<usize>, logits: Vec<f32>) -> Self {
        Self {
            tokens,
            shape,
            logits,
        }
    }
}

/// A model whose tokenizer and logits can be used directly.
pub trait TokenModel: TextModel {
    /// Converts text to ids. `add_special` adds the special tokens that the model expects around a
    /// text, such as a start token.
    ///
    /// # Errors
    /// If the text is too long or cannot be encoded.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>>;

    /// Converts ids to text, without special tokens.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    fn decode(&self, ids: &[u32]) -> Result<String>;

    /// Renders a conversation with the model's chat template, and tokenizes it as
    /// [`TextModel::chat`] would. Text of the conversation never becomes a control token.
    ///
    /// A backend that supports only roles and contents refuses everything else with
    /// [`ChatPrompt::check_plain`].
    ///
    /// # Errors
    /// If the template refuses the messages; [`ErrorKind::Unsupported`] for inputs that the backend
    /// does not honor.
    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt>;

    /// The source of the model's chat template. If there are several, it is the template for
    /// conversations with tools. It shows how the model writes tool calls and reasoning. `None` if
    /// there is no template, or if the backend does not report it.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// The logits after the prompt's last token or, if `all`, after each of its tokens. Engines
    /// check `interrupt` between prefill steps.
    ///
    /// # Errors
    /// As [`TextModel::generate`] and [`Interrupt::check`].
    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput>;

    /// The natural logarithm of each prompt token's probability, given the tokens before it. The
    /// first token has none.
    ///
    /// # Errors
    /// As [`TokenModel::logits`], and [`ErrorKind::Unsupported`] if the backend cannot compute
    /// log-probabilities.
    fn token_logprobs(&self, prompt: &Prompt, interrupt: &Interrupt) -> Result<Vec<f32>> {
        let _ = (prompt, interrupt);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend does not give the probabilities of a prompt's tokens",
        ))
    }

    /// Tokens that end a reply.
    fn eos_tokens(&self) -> Vec<u32>;
}
