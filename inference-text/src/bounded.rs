//! Texts and pairs of texts with a bound on their tokens, as encoders read them.

use inference::{Error, ErrorKind, Result};
use tokenizers::PostProcessor as _;
use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};

use super::tokenizer::{Tokenizer, guarded};

/// The tokens of a text or a pair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Their ids.
    pub ids: Vec<u32>,
    /// Which text of a pair each is of, as the vocabulary's post-processor says: 0 or 1.
    pub types: Vec<u32>,
}

impl Tokenizer {
    /// Encodes a text, or a pair, with the tokens around it: at most `most` in all. A longer one is
    /// cut at its end where `truncate`, the longer text of a pair first, as Hugging Face's
    /// `longest_first`. Special tokens that a text spells become these tokens, as in
    /// [`Tokenizer::encode`].
    ///
    /// # Errors
    /// `InvalidOption` for more tokens, unless `truncate`, and for a bound below the number of tokens
    /// around a text; `Unsupported` for a pair where the vocabulary does not say how to join one;
    /// else as [`Tokenizer::encode`].
    pub fn encode_bounded(
        &self,
        text: &str,
        pair: Option<&str>,
        most: Option<usize>,
        truncate: bool,
    ) -> Result<Encoded> {
        let engine = self.engine();
        let single = |text: &str| {
            self.check_length(text)?;
            guarded("encode", || engine.encode_fast(text, false))
        };
        let mut first = single(text)?;
        let mut second = pair.map(single).transpose()?;
        let affixes = self.own_affixes();
        let around = match (&affixes, engine.get_post_processor()) {
            (Some(_), _) if pair.is_some() => return Err(no_pairs()),
            (None, None) if pair.is_some() => return Err(no_pairs()),
            (Some((before, after)), _) => before.len() + after.len(),
            (None, processor) => processor.map_or(0, |p| p.added_tokens(pair.is_some())),
        };
        let own = first.get_ids().len() + second.as_ref().map_or(0, |s| s.get_ids().len());
        if let Some(most) = most
            && own + around > most
        {
            let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
            if !truncate {
                return bad(format!(
                    "the text has {} tokens; at most {most} are read, and truncate cuts the rest",
                    own + around
                ));
            }
            let Some(left) = most.checked_sub(around).filter(|n| *n > 0) else {
                return bad(format!(
                    "the longest text is {most} tokens, of which {around} stand around it"
                ));
            };
            let params = TruncationParams {
                max_length: left,
                ..TruncationParams::default()
            };
            (first, second) = guarded("cut", || truncate_encodings(first, second, &params))?;
        }
        if let Some((before, after)) = affixes {
            let ids: Vec<u32> = [&before[..], first.get_ids(), &after[..]].concat();
            let types = vec![0; ids.len()];
            return Ok(Encoded { ids, types });
        }
        let encoding = guarded("encode", || engine.post_process(first, second, true))?;
        Ok(Encoded {
            ids: encoding.get_ids().to_vec(),
            types: encoding.get_type_ids().to_vec(),
        })
    }
}

fn no_pairs() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "the vocabulary does not say how two texts are joined",
    )
}
