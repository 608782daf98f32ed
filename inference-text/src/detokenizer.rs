//! Converts a stream of token ids to text.
//!
//! A character is never split. Spaces equal those of decoding the whole sequence at once. Stop
//! strings are found across token boundaries. The decode loop handles stop *tokens* by their ids.

use std::sync::Arc;

use inference::kit::StopText;

use super::pieces::TextBuilder;
use super::tokenizer::Tokenizer;

/// The output of one step of a [`Detokenizer`].
pub type Released = inference::kit::Released<u32>;

/// Converts a stream of ids to text.
///
/// A token is withheld until its text is final, because it may contain an incomplete UTF-8
/// character or the start of a stop string ([`StopText`]). The released texts, joined, equal
/// [`Tokenizer::decode`] of all ids, up to the first complete stop string.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    builder: TextBuilder,
    text: StopText<u32>,
}

impl Detokenizer {
    /// A stream that ends at any of the strings in `stop`. Empty strings are ignored.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &[String]) -> Self {
        Self {
            builder: TextBuilder::new(tokenizer.rule()),
            tokenizer,
            text: StopText::new(stop),
        }
    }

    /// Keeps the space before the first token. Use this for text that continues a raw prompt, where
    /// SentencePiece's leading space is part of the text.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.builder.keep_start();
        self
    }

    /// Adds the next id. After a stop string was found, no text is returned.
    pub fn push(&mut self, id: u32) -> Released {
        let text = self.tokenizer.feed(id, &mut self.builder);
        self.text.push(id, &text, self.builder.is_open())
    }

    /// Ends the stream. Returns the withheld text, with U+FFFD for an incomplete character.
    pub fn finish(&mut self) -> Released {
        let rest = self.builder.finish();
        self.text.finish(&rest)
    }

    /// The stop string that ended the stream, if any.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.text.stopped()
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
