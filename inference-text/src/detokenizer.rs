//! Converts ids to text, one token at a time, for streams.
//!
//! A character is never split. Spaces are the same as when the whole sequence is decoded at once.
//! Stop strings are found across token boundaries. The decode loop handles stop *tokens*, by id.

use std::sync::Arc;

use inference::kit::StopText;

use super::pieces::TextBuilder;
use super::tokenizer::Tokenizer;

/// The output of one step of a [`Detokenizer`].
pub type Released = inference::kit::Released<u32>;

/// Converts a stream of ids to text.
///
/// A token is held back until its text is final: it may contain an incomplete UTF-8 character, or
/// begin a stop string ([`StopText`]). The released texts, joined, equal [`Tokenizer::decode`] of
/// all ids, cut before the first complete stop string.
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

    /// Keeps the space before the first token. Use it for text that continues a raw prompt, where
    /// the leading space of SentencePiece is part of the text.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.builder.keep_start();
        self
    }

    /// Takes the next id. After a stop string, it returns no text.
    pub fn push(&mut self, id: u32) -> Released {
        let text = self.tokenizer.feed(id, &mut self.builder);
        self.text.push(id, &text, self.builder.is_open())
    }

    /// Ends the stream. Returns the text that was held back, with U+FFFD for an incomplete
    /// character.
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
