//! Tokenizers from GGUF metadata, for models without a `tokenizer.json`.
//!
//! Five kinds are supported: `bert` (WordPiece, in `tokenizer_wordpiece.rs`), `gpt2` (byte-level
//! BPE with a named pre-tokenizer), `llama` (SentencePiece BPE with scores), `gemma4` (BPE over
//! characters, with merge rules) and `rwkv` (the longest token at each position, in
//! `tokenizer_greedy.rs`). `tokenizer_gguf_words.rs` has the named pre-tokenizers.

use std::collections::{HashMap, HashSet};

use inference::{Error, ErrorKind, Result};
use tokenizers::AddedToken;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{
    NormalizerWrapper, Prepend, Replace, Sequence as NormalizerSequence, unicode::NFC,
};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;

use super::limits::TextLimits;
use super::pieces::byte_token;
use super::tokenizer::{Engine, Facts, Tokenizer, guarded};
use super::tokenizer_gguf_words::words;
use super::tokenizer_greedy;
use inference_formats::GgufTokenizerParts;

// Values of `tokenizer.ggml.token_type` with a meaning; other values mean ordinary text.
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// Control tokens that end a turn or a text. Converters may list only one of them.
const ENDS: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|observation|>",
    "</s>",
];

impl Tokenizer {
    /// The value of `tokenizer.ggml.model` for byte-level BPE.
    pub const GGUF_BYTE_LEVEL: &str = "gpt2";

    /// The value of `tokenizer.ggml.model` for SentencePiece's BPE.
    pub const GGUF_PIECES: &str = "llama";

    /// Values of `tokenizer.ggml.pre` that an export tries, in this order, until one splits words
    /// like the model's own tokenizer. `default` is omitted, because no family uses it.
    pub const GGUF_SPLITS: [&str; 16] = [
        "smollm",
        "gpt-2",
        "llama-bpe",
        "dbrx",
        "qwen2",
        "tekken",
        "stablelm2",
        "olmo",
        "command-r",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "gpt-4o",
        "qwen35",
        "kimi-k2",
        "exaone-moe",
    ];

    /// The file of a model directory that has RWKV's vocabulary.
    pub const GREEDY_FILE: &str = tokenizer_greedy::FILE;

    /// The content of [`Self::GREEDY_FILE`]; `None` for another kind of tokenizer, which is saved
    /// as `tokenizer.json`.
    ///
    /// # Errors
    /// `InvalidModel` if a token has an incomplete escape.
    pub fn greedy_file(parts: &GgufTokenizerParts) -> Result<Option<String>> {
        tokenizer_greedy::to_file(parts)
    }

    /// Builds the tokenizer that a GGUF file describes in its metadata.
    ///
    /// # Errors
    /// `Unsupported` for an unknown tokenizer model or pre-tokenizer; the message lists the known
    /// names. `InvalidModel` if the metadata contradict themselves or exceed the limits.
    pub fn from_gguf(parts: &GgufTokenizerParts) -> Result<Self> {
        Self::from_gguf_with(parts, &TextLimits::default())
    }

    /// [`Tokenizer::from_gguf`] with other limits.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`].
    pub fn from_gguf_with(parts: &GgufTokenizerParts, limits: &TextLimits) -> Result<Self> {
        check(parts, limits)?;
        let respelled;
        let mut parts = parts;
        if parts.model == tokenizer_greedy::MODEL {
            respelled = tokenizer_greedy::respelled(parts)?;
            parts = &respelled;
        }
        let (piece, rules) = match parts.model.as_str() {
            Self::GGUF_BYTE_LEVEL => (false, true),
            tokenizer_greedy::MODEL => (false, false),
            "gemma4" => (true, true),
            Self::GGUF_PIECES => (true, false),
            "bert" => return super::tokenizer_wordpiece::build(parts, limits),
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "tokenizer model {other:?} in tokenizer.ggml.model; supported are gpt2, llama, gemma4, rwkv and bert"
                    ),
                ));
            }
        };
        let (vocab, hidden) = vocabulary(&parts.tokens);
        let space = piece && parts.add_space_prefix.unwrap_or(!rules);
        let mut greedy = None;
        let (mut engine, adds_bos) = match (piece, rules) {
            (true, true) => {
                let merges = merges(parts, &vocab)?;
                (marked(parts, (vocab, merges), space)?, true)
            }
            (true, false) => {
                let merges = merges_by_score(parts, &vocab, limits)?;
                (marked(parts, (vocab, merges), space)?, true)
            }
            (false, true) => byte_level(parts, vocab)?,
            (false, false) => {
                greedy = Some(tokenizer_greedy::build(parts)?);
                let engine = guarded("build the tokenizer", || tokenizer_greedy::engine(vocab))?;
                (engine, false)
            }
        };
        // SentencePiece's usual ids, which files may omit.
        let usual = |id: u32| (piece && !rules).then_some(id);
        add_tokens(&mut engine, parts)?;

        let mut facts = Facts {
            bos: parts.bos_id.or(usual(1)),
            unk: parts.unk_id.or(usual(0)),
            pad: parts.pad_id,
            affixes: Some((
                parts.add_bos.unwrap_or(adds_bos),
                parts.add_eos.unwrap_or(false),
            )),
            vocab_size: Some(parts.tokens.len()),
            hidden,
            greedy,
            ..Facts::default()
        };
        let known = ENDS
            .into_iter()
            .filter_map(|token| engine.token_to_id(token))
            .filter(|id| kind(parts, *id) == CONTROL);
        let main = parts.eos_id.or(usual(2));
        let mut seen = HashSet::new();
        facts.eos = main
            .into_iter()
            .chain(parts.extra_eos_ids.iter().copied())
            .chain(known)
            .filter(|id| seen.insert(*id))
            .collect();
        for (name, id) in [
            ("bos", facts.bos),
            ("unknown", facts.unk),
            ("padding", facts.pad),
            ("eos", main),
        ] {
            if let Some(id) = id
                && text(parts, id).is_none()
            {
                return Err(bad(format!(
                    "tokenizer.ggml.{name}_token_id is {id}, outside the vocabulary of {} tokens",
                    parts.tokens.len()
                )));
            }
        }
        facts.eos.retain(|id| text(parts, *id).is_some());
        Self::from_engine(engine, facts, limits.clone())
    }
}

fn bad(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidModel, what)
}

fn text(parts: &GgufTokenizerParts, id: u32) -> Option<&str> {
    parts
        .tokens
        .get(usize::try_from(id).ok()?)
        .map(String::as_str)
}

fn kind(parts: &GgufTokenizerParts, id: u32) -> i32 {
    let types = parts.token_types.as_deref().unwrap_or_default();
    usize::try_from(id)
        .ok()
        .and_then(|id| types.get(id))
        .copied()
        .unwrap_or(1)
}

fn check(parts: &GgufTokenizerParts, limits: &TextLimits) -> Result<()> {
    let n = parts.tokens.len();
    if n == 0 {
        return Err(bad("tokenizer.ggml.tokens is empty"));
    }
    if n > limits.vocab {
        return Err(bad(format!(
            "tokenizer.ggml.tokens has {n} tokens; at most {} are read",
            limits.vocab
        )));
    }
    if let Some((id, long)) = parts
        .tokens
        .iter()
        .enumerate()
        .find(|(_, t)| t.len() > limits.token_bytes)
    {
        let (have, most) = (long.len(), limits.token_bytes);
        return Err(bad(format!(
            "token {id} in tokenizer.ggml.tokens has {have} bytes; at most {most} are read"
        )));
    }
    let bytes: usize = parts.tokens.iter().map(String::len).sum();
    if bytes > limits.vocab_bytes {
        let most = limits.vocab_bytes;
        return Err(bad(format!(
            "tokenizer.ggml.tokens holds {bytes} bytes; at most {most} are read"
        )));
    }
    for (name, have) in [
        ("scores", parts.scores.as_ref().map(Vec::len)),
        ("token_type", parts.token_types.as_ref().map(Vec::len)),
    ] {
        if let Some(have) = have
            && have != n
        {
            return Err(bad(format!(
                "tokenizer.ggml.{name} has {have} entries for {n} tokens"
            )));
        }
    }
    if parts.merges.len() > limits.merges {
        let (have, most) = (parts.merges.len(), limits.merges);
        return Err(bad(format!(
            "tokenizer.ggml.merges has {have} rules; at most {most} are read"
        )));
    }
    Ok(())
}

/// A map from names to ids. If several ids have one name, the first id is used, and the other ids
/// are stored for decoding.
fn vocabulary(tokens: &[String]) -> (Vocab, HashMap<u32, String>) {
    let mut vocab = Vocab::with_capacity(tokens.len());
    let mut hidden = HashMap::new();
    for (id, token) in (0u32..).zip(tokens) {
        if vocab.contains_key(token) {
            hidden.insert(id, token.clone());
        } else {
            vocab.insert(token.clone(), id);
        }
    }
    (vocab, hidden)
}

/// Adds control and user-defined tokens, which are found in a text before all others.
fn add_tokens(engine: &mut Engine, parts: &GgufTokenizerParts) -> Result<()> {
    let mut added = Vec::new();
    for (id, token) in (0u32..).zip(&parts.tokens) {
        let special = match kind(parts, id) {
            CONTROL => true,
            // User text may contain the unknown token's name, and must not become this token.
            UNKNOWN => true,
            USER_DEFINED => false,
            _ => continue,
        };
        if !token.is_empty() {
            added.push(AddedToken::from(token.as_str(), special).normalized(false));
        }
    }
    guarded("add the control tokens", || engine.add_tokens(added)).map(|_| ())
}

/// The merge rules of a file, in order. A part of a rule may begin with a space.
fn merges(parts: &GgufTokenizerParts, vocab: &Vocab) -> Result<Merges> {
    let mut merges = Merges::with_capacity(parts.merges.len());
    for (n, merge) in parts.merges.iter().enumerate() {
        let mut spaces = merge.char_indices().skip(1).filter(|(_, c)| *c == ' ');
        let Some((at, _)) = spaces.next() else {
            return Err(bad(format!(
                "rule {n} in tokenizer.ggml.merges is no pair: {merge:?}"
            )));
        };
        let (left, right) = (&merge[..at], &merge[at + 1..]);
        let merged = format!("{left}{right}");
        if let Some(missing) = [left, right, &merged]
            .into_iter()
            .find(|t| !vocab.contains_key(*t))
        {
            return Err(bad(format!(
                "rule {n} in tokenizer.ggml.merges ({merge:?}) needs {missing:?}, which tokenizer.ggml.tokens lacks"
            )));
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

fn byte_level(parts: &GgufTokenizerParts, vocab: Vocab) -> Result<(Engine, bool)> {
    let mut words = words(parts.pre.as_deref())?;
    let merges = merges(parts, &vocab)?;
    let model = guarded("build the tokenizer", || {
        BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(words.known_words)
            .build()
    })?;
    let mut engine = Engine::new(model);
    words
        .splits
        .push(ByteLevel::new(false, true, words.gpt2).into());
    engine.with_pre_tokenizer(Some(Sequence::new(words.splits)));
    engine.with_decoder(Some(ByteLevel::default()));
    if words.nfc {
        guarded("normalize", || {
            engine
                .with_normalizer(Some(NormalizerWrapper::from(NFC)))
                .map(|_| ())
        })?;
    }
    Ok((engine, words.bos))
}

/// SentencePiece repeatedly joins the two adjacent pieces whose union has the best score.
/// Equivalent merge rules are all splits of each token into two tokens, ordered by score.
fn merges_by_score(
    parts: &GgufTokenizerParts,
    vocab: &Vocab,
    limits: &TextLimits,
) -> Result<Merges> {
    let Some(scores) = &parts.scores else {
        return Err(bad(
            "tokenizer model llama needs tokenizer.ggml.scores, which the file lacks",
        ));
    };
    if let Some(id) = scores.iter().position(|s| s.is_nan()) {
        return Err(bad(format!(
            "tokenizer.ggml.scores holds no number for token {id}"
        )));
    }
    let learned = |id: u32| !matches!(kind(parts, id), UNKNOWN | CONTROL | BYTE);
    let mut candidates: Vec<(f32, String, String)> = Vec::new();
    for ((id, token), score) in (0u32..).zip(&parts.tokens).zip(scores) {
        if !learned(id) || vocab.get(token) != Some(&id) {
            continue;
        }
        let mut here: Vec<(u32, u32, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = token.split_at(at);
                let pair = (*vocab.get(left)?, *vocab.get(right)?);
                (learned(pair.0) && learned(pair.1)).then_some((pair.0, pair.1, at))
            })
            .collect();
        here.sort_unstable();
        candidates.extend(here.into_iter().map(|(_, _, at)| {
            let (left, right) = token.split_at(at);
            (*score, left.to_owned(), right.to_owned())
        }));
        if candidates.len() > limits.merges {
            let most = limits.merges;
            return Err(bad(format!(
                "the vocabulary needs more than {most} merge rules, the most that are built"
            )));
        }
    }
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
    let rules = candidates.into_iter().map(|(_, left, right)| (left, right));
    Ok(rules.collect())
}

/// BPE over characters, with a marker instead of spaces. With `space`, a marker also precedes a
/// text. Text without a token becomes byte tokens, if the vocabulary has them.
fn marked(
    parts: &GgufTokenizerParts,
    (vocab, merges): (Vocab, Merges),
    space: bool,
) -> Result<Engine> {
    let fallback = (0..=255u8).all(|byte| {
        let token = format!("<0x{byte:02X}>");
        byte_token(&token).is_some() && vocab.contains_key(&token)
    });
    let by_score = parts.model == Tokenizer::GGUF_PIECES;
    let unk = parts.unk_id.or(by_score.then_some(0));
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .byte_fallback(fallback)
        .fuse_unk(true);
    if let Some(unk) = unk.and_then(|id| text(parts, id)) {
        builder = builder.unk_token(unk.to_owned());
    }
    let model = guarded("build the tokenizer", || builder.build())?;
    let mut engine = Engine::new(model);
    let marker = guarded("normalize", || Replace::new(" ", "▁"))?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if space {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(marker.into());
    let normalizer = NormalizerSequence::new(steps);
    guarded("normalize", || {
        engine.with_normalizer(Some(normalizer)).map(|_| ())
    })?;
    let text_marker = guarded("decode", || Replace::new("▁", " "))?;
    let mut decoders: Vec<DecoderWrapper> = vec![
        text_marker.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if space {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    engine.with_decoder(Some(DecoderSequence::new(decoders)));
    Ok(engine)
}

#[cfg(test)]
#[path = "tokenizer_gguf_tests.rs"]
mod tests;
