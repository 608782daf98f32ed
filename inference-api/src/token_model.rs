//! Models that show ids and logits.

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{ChatEnd, ChatPrompt, Message, Prompt};

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

    /// A conversation as the model's template writes it.
    ///
    /// # Errors
    /// When the template refuses the messages.
    fn render_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String>;

    /// The ids of a conversation, as [`TextModel::chat`] would run it.
    ///
    /// # Errors
    /// When the template refuses the messages, and [`ErrorKind::Unsupported`] where the backend
    /// does not have it.
    fn encode_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Vec<u32>> {
        let _ = (messages, add_generation_prompt);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend does not give the ids of a conversation",
        ))
    }

    /// [`TokenModel::encode_chat`] of a conversation with tools, tool calls and more for the
    /// template. No text in it becomes a control token of the model. This one, for backends that
    /// know only roles and contents, refuses everything else.
    ///
    /// # Errors
    /// As [`TokenModel::encode_chat`], and [`ErrorKind::Unsupported`] for what the backend does not
    /// honor.
    fn encode_chat_with(&self, prompt: &ChatPrompt) -> Result<Vec<u32>> {
        refuse_all_but_plain(prompt)?;
        self.encode_chat(&prompt.messages, prompt.end == ChatEnd::Reply)
    }

    /// [`TokenModel::render_chat`] of a conversation with tools, tool calls and more for the
    /// template.
    ///
    /// # Errors
    /// As [`TokenModel::render_chat`], and [`ErrorKind::Unsupported`] for what the backend does not
    /// honor.
    fn render_chat_with(&self, prompt: &ChatPrompt) -> Result<String> {
        refuse_all_but_plain(prompt)?;
        self.render_chat(&prompt.messages, prompt.end == ChatEnd::Reply)
    }

    /// The source of the model's chat template; of several the one for conversations with tools.
    /// It shows how the model writes tool calls and reasoning. `None` where there is none, or the
    /// backend does not give it.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// The logits after the prompt's last token, or after each of its tokens when `all`.
    ///
    /// # Errors
    /// As [`TextModel::generate`].
    fn logits(&self, prompt: &Prompt, all: bool) -> Result<LogitsOutput>;

    /// [`TokenModel::logits`], unless `interrupt` ends it. Engines ask between the steps of a
    /// prompt; this one, for those that do not, asks before and after.
    ///
    /// # Errors
    /// As [`TokenModel::logits`] and [`Interrupt::check`].
    fn logits_until(
        &self,
        prompt: &Prompt,
        all: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput> {
        interrupt.check()?;
        let output = self.logits(prompt, all)?;
        interrupt.check()?;
        Ok(output)
    }

    /// The natural logarithm of the probability of each token of the prompt but the first, given
    /// those before it.
    ///
    /// # Errors
    /// As [`TextModel::generate`], and [`ErrorKind::Unsupported`] where the backend does not have
    /// it.
    fn token_logprobs(&self, prompt: &Prompt) -> Result<Vec<f32>> {
        let _ = prompt;
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend does not give the probabilities of a prompt's tokens",
        ))
    }

    /// [`TokenModel::token_logprobs`], unless `interrupt` ends it, as in
    /// [`TokenModel::logits_until`].
    ///
    /// # Errors
    /// As [`TokenModel::token_logprobs`] and [`Interrupt::check`].
    fn token_logprobs_until(&self, prompt: &Prompt, interrupt: &Interrupt) -> Result<Vec<f32>> {
        interrupt.check()?;
        let logprobs = self.token_logprobs(prompt)?;
        interrupt.check()?;
        Ok(logprobs)
    }

    /// Tokens that end a reply.
    fn eos_tokens(&self) -> Vec<u32>;
}

fn refuse_all_but_plain(prompt: &ChatPrompt) -> Result<()> {
    if prompt.is_plain() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "this backend knows only roles and contents of messages; leave out tools, tool calls, names, \
         reasoning, template arguments and continued messages",
    ))
}
