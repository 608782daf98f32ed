//! The tokenizer of a model, which converts text to ids and back.
//!
//! It wraps the `tokenizers` crate, adds the tokens that begin and end a text, and keeps control
//! tokens out of user text. `tokenizer_files` and `tokenizer_gguf` load vocabularies,
//! `chat_template` renders conversations, and `pipeline` encodes them.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use inference::{Error, ErrorKind, Result};
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{Encoding, PreTokenizerWrapper};

use super::limits::TextLimits;
use super::pieces::{DecodeRule, TextBuilder};
use super::tokenizer_greedy::Greedy;

/// The tokenizer type of the `tokenizers` crate.
pub(crate) type Engine = tokenizers::Tokenizer;

/// Converts text to ids and ids to text, as in training.
#[derive(Debug)]
pub struct Tokenizer {
    engine: Engine,
    plain: OnceLock<Plain>,
    rule: DecodeRule,
    facts: Facts,
    /// Tokens that decoding skips.
    special: HashSet<u32>,
    /// Tokens that user text must never become.
    control: HashSet<u32>,
    limits: TextLimits,
}

/// Properties from files other than the vocabulary.
#[derive(Debug, Default)]
pub(crate) struct Facts {
    pub(crate) bos: Option<u32>,
    /// The ids of end-of-text tokens without duplicates, the most important first.
    pub(crate) eos: Vec<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
    /// Tokens that control the model although the vocabulary does not mark them as special.
    pub(crate) control: Vec<u32>,
    /// Whether encoding with special tokens adds bos at the start and eos at the end. With `None`,
    /// the vocabulary file's post-processor decides.
    pub(crate) affixes: Option<(bool, bool)>,
    /// The number of ids, if the vocabulary does not determine it.
    pub(crate) vocab_size: Option<usize>,
    /// Texts of ids that the vocabulary cannot look up, because another id has an equal text.
    pub(crate) hidden: HashMap<u32, String>,
    /// The encoder that takes the longest token at each position. It replaces the engine's model.
    pub(crate) greedy: Option<Greedy>,
}

/// The tokenizer without control tokens. One instance is for the start of a text, and one for later
/// parts.
#[derive(Debug)]
struct Plain {
    start: Engine,
    /// `None` if both instances would be equal.
    rest: Option<Engine>,
}

impl Tokenizer {
    /// Combines the parts of a tokenizer.
    ///
    /// # Errors
    /// `Unsupported` for an unknown kind of decoder.
    pub(crate) fn from_engine(
        mut engine: Engine,
        facts: Facts,
        limits: TextLimits,
    ) -> Result<Self> {
        // A file may require truncation and padding. They are disabled, because a prompt must not
        // be cut silently.
        let _ = engine.with_truncation(None);
        engine.with_padding(None);
        let decoder = serde_json::to_value(engine.get_decoder()).unwrap_or_default();
        let rule = DecodeRule::from_json(&decoder)?;
        let special: HashSet<u32> = engine
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        let mut control = special.clone();
        control.extend(facts.bos.iter().chain(&facts.eos).chain(&facts.control));
        // If some bytes have no token, ordinary text may become the unknown token.
        if rule != DecodeRule::ByteLevel
            && let Some(unk) = facts.unk
        {
            control.remove(&unk);
        }
        let tokenizer = Self {
            engine,
            plain: OnceLock::new(),
            rule,
            facts,
            special,
            control,
            limits,
        };
        // A vocabulary that passes the checks but does not work must fail here, not at the first
        // request.
        tokenizer.encode("a b\n1é", true)?;
        Ok(tokenizer)
    }

    /// Encodes `text`. If the text contains the name of a special token, it becomes that token, as
    /// for raw prompts in Hugging Face and mlx-lm. `add_special` adds the tokens that begin and end
    /// a text.
    ///
    /// For a user's text inside a conversation, use [`Tokenizer::encode_plain`] or a chat.
    ///
    /// # Errors
    /// `InvalidOption` for a text longer than [`TextLimits::text_bytes`]; `InvalidModel` if the
    /// vocabulary fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.check_length(text)?;
        let engine_adds = add_special && self.facts.affixes.is_none();
        let encoding = self.encoding_without_offsets(text, engine_adds)?;
        let mut ids = encoding.get_ids().to_vec();
        if add_special && let Some((begin, end)) = self.facts.affixes {
            if begin && let Some(bos) = self.facts.bos {
                ids.insert(0, bos);
            }
            if end && let Some(eos) = self.facts.eos.first() {
                ids.push(*eos);
            }
        }
        Ok(ids)
    }

    /// Encodes `text` without control tokens: `<|im_end|>` becomes about nine ordinary tokens. No
    /// tokens are added around it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; `InvalidOption` if a single character is a control token.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.check_length(text)?;
        let mut ids = Vec::new();
        self.encode_plain_into(text, true, &mut ids)?;
        Ok(ids)
    }

    /// [`Tokenizer::encode_plain`] for one part of a text. `start` is whether this is the first
    /// part.
    pub(crate) fn encode_plain_into(
        &self,
        text: &str,
        start: bool,
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        let plain = self.plain.get_or_init(|| Plain::new(&self.engine));
        let mut parts = vec![(text, start)];
        while let Some((part, start)) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            let engine = plain
                .rest
                .as_ref()
                .filter(|_| !start)
                .unwrap_or(&plain.start);
            let encoding = self.encoding(engine, part)?;
            // Merges can still produce a control token. If so, its text is divided and the pieces
            // are encoded.
            let mut cuts = vec![0];
            for (id, (from, to)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
                if !self.control.contains(id) {
                    continue;
                }
                let first = part
                    .get(*from..)
                    .and_then(|s| s.chars().next())
                    .map_or(0, char::len_utf8);
                let cut = from + first;
                if first == 0 || cut >= *to || cut >= part.len() {
                    return Err(Error::new(
                        ErrorKind::InvalidOption,
                        format!(
                            "the text holds {:?}, which this model's vocabulary knows as a control token only; leave it out",
                            part.get(*from..*to).unwrap_or_default()
                        ),
                    ));
                }
                cuts.push(cut);
            }
            if cuts.len() == 1 {
                ids.extend_from_slice(encoding.get_ids());
                continue;
            }
            cuts.push(part.len());
            let pieces: Vec<_> = cuts
                .windows(2)
                .map(|w| (part.get(w[0]..w[1]).unwrap_or_default(), start && w[0] == 0))
                .collect();
            parts.extend(pieces.into_iter().rev());
        }
        Ok(())
    }

    /// The control tokens that encoding `text` as markup would produce, with their byte ranges.
    pub(crate) fn control_spans(&self, text: &str) -> Result<Vec<(u32, std::ops::Range<usize>)>> {
        self.check_length(text)?;
        let encoding = self.encoding(&self.engine, text)?;
        Ok(encoding
            .get_ids()
            .iter()
            .zip(encoding.get_offsets())
            .filter(|(id, _)| self.control.contains(id))
            .map(|(id, (from, to))| (*id, *from..*to))
            .collect())
    }

    /// Encodes a text with an engine of this tokenizer, without tokens around it.
    pub(crate) fn encoding(&self, engine: &Engine, text: &str) -> Result<Encoding> {
        guarded("encode", || match &self.facts.greedy {
            Some(greedy) => greedy.encode(engine, text),
            None => engine.encode(text, false),
        })
    }

    /// As [`Self::encoding`] with the whole tokenizer. The offsets of tokens may be missing.
    pub(crate) fn encoding_without_offsets(
        &self,
        text: &str,
        engine_adds: bool,
    ) -> Result<Encoding> {
        guarded("encode", || match &self.facts.greedy {
            Some(greedy) => greedy.encode(&self.engine, text),
            None => self.engine.encode_fast(text, engine_adds),
        })
    }

    /// The texts of all control tokens.
    pub(crate) fn control_texts(&self) -> impl Iterator<Item = String> + '_ {
        self.control.iter().filter_map(|id| self.token_text(*id))
    }

    /// The text of `ids`. Special tokens and unknown ids add nothing. Invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// `InvalidOption` if the text is longer than four times [`TextLimits::text_bytes`].
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let most = self.limits.text_bytes.saturating_mul(4);
        let mut builder = TextBuilder::new(&self.rule);
        let mut text = String::new();
        for id in ids {
            text.push_str(&self.feed(*id, &mut builder));
            if text.len() > most {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "{} tokens are more than {most} bytes of text; decode fewer at a time",
                        ids.len()
                    ),
                ));
            }
        }
        text.push_str(&builder.finish());
        Ok(text)
    }

    /// Adds an id to `builder` and returns the text that it completes.
    pub(crate) fn feed(&self, id: u32, builder: &mut TextBuilder) -> String {
        if self.special.contains(&id) {
            return String::new();
        }
        match self.token_text(id) {
            Some(token) => builder.push(&self.rule, &token, self.is_added(id)),
            None => String::new(),
        }
    }

    /// The token `id` as spelled in the vocabulary: `Ġthe`, `▁the`, `<|im_end|>`. This is not yet
    /// decoded text.
    #[must_use]
    pub fn token_text(&self, id: u32) -> Option<String> {
        if let Some(token) = self
            .engine
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&id)
        {
            return Some(token.content.clone());
        }
        self.engine
            .id_to_token(id)
            .or_else(|| self.facts.hidden.get(&id).cloned())
    }

    /// The bytes that the token `id` adds in the middle of a text; they may be part of a character.
    /// `None` for ids outside the vocabulary.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.token_text(id)?;
        Some(self.rule.bytes(&token, self.is_added(id), false))
    }

    /// The id of a token, spelled as in the vocabulary.
    #[must_use]
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.engine.token_to_id(token)
    }

    /// The tokens that end a text. Each occurs once, the main one first.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.facts.eos
    }

    /// The token that begins a text.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.facts.bos
    }

    /// The token that pads a batch.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.facts.pad
    }

    /// The token for text that the vocabulary cannot express.
    #[must_use]
    pub fn unk_id(&self) -> Option<u32> {
        self.facts.unk
    }

    /// Whether decoding skips the token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether the token controls the model, so that user text must never become it.
    #[must_use]
    pub fn is_control(&self, id: u32) -> bool {
        self.control.contains(&id)
    }

    /// Number of tokens, added ones included. The embedding of a model may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.facts
            .vocab_size
            .unwrap_or_else(|| self.engine.get_vocab_size(true))
    }

    /// Whether encoding with special tokens adds bos at the start and eos at the end. `(false,
    /// false)` if the vocabulary file's post-processor decides.
    #[must_use]
    pub fn affixes(&self) -> (bool, bool) {
        self.facts.affixes.unwrap_or((false, false))
    }

    /// The vocabulary and the pre-tokenizer, in the form of a `tokenizer.json`. [`Self::affixes`]
    /// are not included.
    ///
    /// # Errors
    /// `InvalidModel` when the vocabulary cannot be written.
    pub fn to_json(&self) -> Result<serde_json::Value> {
        guarded("write the tokenizer", || {
            Ok(serde_json::to_value(&self.engine)?)
        })
    }

    /// The limits with which the tokenizer was loaded.
    #[must_use]
    pub fn limits(&self) -> &TextLimits {
        &self.limits
    }

    pub(crate) fn rule(&self) -> &DecodeRule {
        &self.rule
    }

    fn is_added(&self, id: u32) -> bool {
        self.engine
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .contains_key(&id)
    }

    /// The tokenizer of the `tokenizers` crate.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The tokens before and after a text, unless the post-processor adds them.
    pub(crate) fn own_affixes(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let (begin, end) = self.facts.affixes?;
        let bos = self.facts.bos.filter(|_| begin);
        let eos = self.facts.eos.first().copied().filter(|_| end);
        Some((bos.into_iter().collect(), eos.into_iter().collect()))
    }

    pub(crate) fn check_length(&self, text: &str) -> Result<()> {
        if text.len() > self.limits.text_bytes {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the text has {} bytes; at most {} are encoded at once",
                    text.len(),
                    self.limits.text_bytes
                ),
            ));
        }
        Ok(())
    }
}

impl Plain {
    fn new(engine: &Engine) -> Self {
        let mut start = engine.clone();
        start.set_encode_special_tokens(true);
        // Only the first part gets the space marker, so later parts need an instance without the
        // marker.
        let rest = match engine.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::Metaspace(meta))
                if meta.prepend_scheme == PrependScheme::First =>
            {
                let mut meta = meta.clone();
                meta.set_prepend_scheme(PrependScheme::Never);
                let mut rest = start.clone();
                rest.with_pre_tokenizer(Some(meta));
                Some(rest)
            }
            _ => None,
        };
        Self { start, rest }
    }
}

/// Calls the `tokenizers` crate on untrusted input. Errors and panics are converted, because the
/// crate panics on some inconsistent vocabularies.
pub(crate) fn guarded<T>(doing: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(Error::new(ErrorKind::InvalidModel, format!("the tokenizer refuses: {source}"))
            .context(doing)
            .with_source(source)),
        Err(_) => Err(Error::new(
            ErrorKind::InvalidModel,
            "the tokenizer contradicts itself; check that its file is complete and belongs to this model",
        )
        .context(doing)),
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
