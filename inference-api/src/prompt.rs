//! Conversations that are ready to run.

use crate::message::Prompt;

/// A conversation as the model's template writes it, and its ids. It is rendered and tokenized
/// once: show the text, run the ids.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedPrompt {
    /// The text. Do not run it: in the text, a control token looks the same as a message that
    /// contains its name.
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
