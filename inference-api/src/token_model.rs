//! Models that show ids and logits.

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
    /// Row-major, one row a position.
    pub logits: Vec<f32>,
}

impl LogitsOutput {
    /// Logits of `shape` for the prompt `tokens`.
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
    /// Text to ids; `add_special` adds what the model wants around a text, such as a start token.
    ///
    /// # Errors
    /// When the text is too long or cannot be encoded.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>>;

    /// Ids to text, without special tokens.
    ///
    /// # Errors
    /// When an id is not in the vocabulary.
    fn decode(&self, ids: &[u32]) -> Result<String>;

    /// Renders a conversation by the model's template, and tokenizes it as [`TextModel::chat`]
    /// would run it. No text in the conversation becomes a control token of the model.
    ///
    /// A backend that knows only roles and contents refuses everything else by
    /// [`ChatPrompt::check_plain`].
    ///
    /// # Errors
    /// When the template refuses the messages, and [`ErrorKind::Unsupported`] for what the backend
    /// does not honor.
    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt>;

    /// The source of the model's chat template; of several the one for conversations with tools.
    /// It shows how the model writes tool calls and reasoning. `None` where there is none, or the
    /// backend does not give it.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// The logits after the prompt's last token, or after each of its tokens when `all`. Engines
    /// check `interrupt` between the steps of a prompt.
    ///
    /// # Errors
    /// As [`TextModel::generate`] and [`Interrupt::check`].
    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput>;

    /// The natural logarithm of the probability of each token of the prompt but the first, given
    /// those before it.
    ///
    /// # Errors
    /// As [`TokenModel::logits`], and [`ErrorKind::Unsupported`] where the backend does not have
    /// it.
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
