//! Encodes texts and pairs of texts with a limited number of tokens, as input for encoders.

use inference::{Error, ErrorKind, Result};
use tokenizers::PostProcessor as _;
use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};

use super::tokenizer::{Tokenizer, guarded};

/// The tokens of a text or a pair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The id of each token.
    pub ids: Vec<u32>,
    /// The segment of each token, which the vocabulary's post-processor assigns: 0 for the first
    /// text, 1 for the second.
    pub types: Vec<u32>,
}

impl Tokenizer {
    /// Encodes a text or a pair with its surrounding tokens, at most `most` tokens in total. With
    /// `truncate`, a longer text is cut at its end. In a pair, the longer text is cut first, as in
    /// Hugging Face's `longest_first`. If a text contains the name of a special token, it becomes
    /// this token, as in [`Tokenizer::encode`].
    ///
    /// # Errors
    /// `InvalidOption` if there are more tokens and `truncate` is false, or if the limit is below
    /// the number of surrounding tokens. `Unsupported` for a pair if the vocabulary does not define
    /// how to join pairs. Otherwise as [`Tokenizer::encode`].
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
            self.encoding_without_offsets(text, false)
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
        let text_tokens = first.get_ids().len() + second.as_ref().map_or(0, |s| s.get_ids().len());
        if let Some(most) = most
            && text_tokens + around > most
        {
            let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
            if !truncate {
                return bad(format!(
                    "the text has {} tokens; at most {most} are read, and truncate cuts the rest",
                    text_tokens + around
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

#[cfg(test)]
mod tests {
    use inference_formats::GgufTokenizerParts;

    use super::*;
    use crate::testing::byte_level;

    const TOKENS: [&str; 12] = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁river", "s", "▁water", "▁.", "▁the", "▁sea", "▁'",
        "▁don",
    ];

    fn word_piece() -> Tokenizer {
        Tokenizer::from_gguf(&GgufTokenizerParts {
            model: "bert".to_owned(),
            tokens: TOKENS.map(String::from).to_vec(),
            unk_id: Some(1),
            cls_id: Some(2),
            sep_id: Some(3),
            ..GgufTokenizerParts::default()
        })
        .unwrap()
    }

    #[test]
    fn words_pieces_and_pairs_of_a_gguf_vocabulary() {
        let t = word_piece();
        let one = t
            .encode_bounded("The RIVERS, water.", None, None, false)
            .unwrap();
        // The comma is not in the vocabulary, so it becomes the unknown token.
        assert_eq!(one.ids, [2, 8, 4, 5, 1, 6, 7, 3]);
        assert_eq!(one.types, [0; 8]);
        assert_eq!(t.encode("The RIVERS, water.", true).unwrap(), one.ids);
        let pair = t
            .encode_bounded("water", Some("the séa"), None, false)
            .unwrap();
        assert_eq!(pair.ids, [2, 6, 3, 8, 9, 3]);
        assert_eq!(pair.types, [0, 0, 0, 1, 1, 1]);
        assert_eq!(
            t.decode(&[2, 8, 4, 5, 6, 7, 3]).unwrap(),
            "the rivers water."
        );
    }

    #[test]
    fn what_is_too_long_is_cut_between_the_tokens_around_it() {
        let t = word_piece();
        let cut =
            |text: &str, pair: Option<&str>, most| t.encode_bounded(text, pair, Some(most), true);
        assert_eq!(cut("river sea water", None, 4).unwrap().ids, [2, 4, 9, 3]);
        assert_eq!(
            cut("river sea water", None, 5).unwrap().ids,
            [2, 4, 9, 6, 3]
        );
        // The longer text of the pair is cut first.
        let pair = cut("river", Some("sea water the sea"), 6).unwrap();
        assert_eq!(pair.ids, [2, 4, 3, 9, 6, 3]);
        let pair = cut("river river water the", Some("sea"), 6).unwrap();
        assert_eq!(pair.ids, [2, 4, 4, 3, 9, 3]);
        for most in 0..=2 {
            let error = cut("river sea", None, most).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        }
        let error = t
            .encode_bounded("river sea water", None, Some(4), false)
            .unwrap_err();
        assert!(error.message().contains("5 tokens; at most 4"), "{error}");
    }

    #[test]
    fn a_vocabulary_that_does_not_join_texts_says_so() {
        let error = byte_level()
            .encode_bounded("a", Some("b"), None, false)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let t = byte_level();
        let one = t
            .encode_bounded("hello there", None, Some(2), true)
            .unwrap();
        assert_eq!(one.ids, t.encode("hello there", true).unwrap()[..2]);
    }

    #[test]
    fn a_gguf_vocabulary_without_its_tokens_is_refused() {
        let parts = GgufTokenizerParts {
            model: "bert".to_owned(),
            tokens: TOKENS.map(String::from).to_vec(),
            unk_id: Some(1),
            cls_id: Some(2),
            sep_id: Some(3),
            ..GgufTokenizerParts::default()
        };
        for damage in [
            |p: &mut GgufTokenizerParts| p.cls_id = None,
            |p: &mut GgufTokenizerParts| p.sep_id = Some(99),
            |p: &mut GgufTokenizerParts| {
                p.unk_id = None;
                p.tokens.remove(1);
            },
        ] {
            let mut parts = parts.clone();
            damage(&mut parts);
            let error = Tokenizer::from_gguf(&parts).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
        }
    }
}
