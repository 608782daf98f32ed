//! Conversations that are rendered and tokenized.

use crate::message::Prompt;

/// A conversation as text, rendered by the model's chat template, and as token ids. Use the text
/// for display, and the ids for inference.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedPrompt {
    /// The text. It is for display only: in the text, a control token and a message that contains
    /// its name look the same.
    pub text: String,
    /// The ids of the prompt.
    pub ids: Vec<u32>,
}

impl PreparedPrompt {
    /// A text and its ids.
    #[must_use]
    pub fn new(text: impl Into<String>, ids: Vec<u32>) -> Self {
        Self {
            text: text.into(),
            ids,
        }
    }
}

impl From<PreparedPrompt> for Prompt {
    fn from(prepared: PreparedPrompt) -> Self {
        Self::Tokens(prepared.ids)
    }
}
