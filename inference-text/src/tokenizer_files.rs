//! Loads tokenizers from a model directory: `tokenizer.json` and the small files beside it.
//!
//! Sizes, counts and merge rules are checked before the file is passed to the `tokenizers` crate.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use inference_formats::files::read_capped;
use inference_formats::python_json;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::AddedToken;

use super::limits::TextLimits;
use super::tokenizer::{Engine, Facts, Tokenizer, guarded};
use super::tokenizer_greedy;

impl Tokenizer {
    /// Loads the tokenizer of a model directory from `tokenizer.json` or, without it, from
    /// `rwkv_vocab_v20230424.txt`. The tokens that begin and end a text come from
    /// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
    /// `config.json`.
    ///
    /// # Errors
    /// `ModelNotFound` without either file; `InvalidModel` if a file is damaged or contradicts
    /// another; `Unsupported` for a kind of tokenizer that this crate cannot decode.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        Self::from_dir_with(dir, &TextLimits::default())
    }

    /// [`Tokenizer::from_dir`] with other limits.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn from_dir_with(dir: impl AsRef<Path>, limits: &TextLimits) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let Some(bytes) = read_bounded(&path, limits.tokenizer_bytes)? else {
            let vocabulary = dir.join(tokenizer_greedy::FILE);
            if let Some(bytes) = read_bounded(&vocabulary, limits.tokenizer_bytes)? {
                return Self::greedy(dir, &bytes, limits).map_err(|e| e.with_path(vocabulary));
            }
            return Err(Error::new(
                ErrorKind::ModelNotFound,
                "the model directory has no tokenizer.json (and no vocabulary of RWKV); save the tokenizer with Hugging Face's fast tokenizers, or use a .gguf",
            )
            .with_path(path));
        };
        let in_file = |e: Error| e.with_path(&path);
        let outline: Outline = serde_json::from_slice(&bytes)
            .map_err(|e| invalid("not a tokenizer", &path).with_source(e))?;
        outline.check(limits).map_err(in_file)?;
        drop(outline);
        let mut engine =
            guarded("load tokenizer", || Engine::from_bytes(&bytes)).map_err(in_file)?;
        drop(bytes);

        let config = read_json(&dir.join("tokenizer_config.json"), limits)?.unwrap_or_default();
        let map = read_json(&dir.join("special_tokens_map.json"), limits)?.unwrap_or_default();
        add_declared(&mut engine, &config["added_tokens_decoder"])
            .map_err(|e| e.with_path(dir.join("tokenizer_config.json")))?;
        let named = |name: &str| {
            token_name(&config[name])
                .or_else(|| token_name(&map[name]))
                .and_then(|token| engine.token_to_id(token))
        };
        let mut facts = Facts {
            bos: named("bos_token"),
            unk: named("unk_token"),
            pad: named("pad_token"),
            affixes: affixes(&config),
            ..Facts::default()
        };
        facts.eos.extend(named("eos_token"));
        for file in ["generation_config.json", "config.json"] {
            let path = dir.join(file);
            let Some(other) = read_json(&path, limits)? else {
                continue;
            };
            // For xLSTM, each text must start with this token, whatever the tokenizer adds.
            if other["force_bos_token_insert"].as_bool() == Some(true) {
                let end = facts.affixes.is_some_and(|(_, end)| end);
                facts.affixes = Some((true, end));
            }
            let bos = ids(&other["bos_token_id"]).map_err(|e| e.with_path(&path))?;
            facts.bos = facts.bos.or_else(|| bos.first().copied());
            facts
                .eos
                .extend(ids(&other["eos_token_id"]).map_err(|e| e.with_path(&path))?);
        }
        let mut seen = std::collections::HashSet::new();
        facts.eos.retain(|id| seen.insert(*id));
        let more = [
            &config["additional_special_tokens"],
            &map["additional_special_tokens"],
        ];
        facts.control = more
            .into_iter()
            .filter_map(Value::as_array)
            .flatten()
            .filter_map(token_name)
            .filter_map(|token| engine.token_to_id(token))
            .collect();
        Self::from_engine(engine, facts, limits.clone()).map_err(in_file)
    }

    /// Loads RWKV's tokenizer from its vocabulary file. The configurations name the tokens that
    /// begin and end a text. Otherwise both are token 0.
    fn greedy(dir: &Path, bytes: &[u8], limits: &TextLimits) -> Result<Self> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| Error::new(ErrorKind::InvalidModel, "not UTF-8").with_source(e))?;
        let mut parts = tokenizer_greedy::from_file(text)?;
        let (mut begins, mut ends) = (Vec::new(), Vec::new());
        for file in ["generation_config.json", "config.json"] {
            let Some(config) = read_json(&dir.join(file), limits)? else {
                continue;
            };
            begins.extend(ids(&config["bos_token_id"])?);
            ends.extend(ids(&config["eos_token_id"])?);
        }
        parts.bos_id = begins.first().copied().or(parts.bos_id);
        if let Some((first, more)) = ends.split_first() {
            parts.eos_id = Some(*first);
            parts.extra_eos_ids = more.to_vec();
        }
        Self::from_gguf_with(&parts, limits)
    }
}

/// Reads a regular file of at most `most` bytes; `None` when there is no file.
pub(crate) fn read_bounded(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    match read_capped(path, most) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == inference_formats::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Reads one of the small JSON files; `None` if there is no such file.
pub(crate) fn read_json(path: &Path, limits: &TextLimits) -> Result<Option<Value>> {
    let Some(bytes) = read_bounded(path, limits.config_bytes)? else {
        return Ok(None);
    };
    python_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| invalid("not JSON", path).with_source(e))
}

/// The text of a token in a configuration, where it is a string or an object with the string.
pub(crate) fn token_name(value: &Value) -> Option<&str> {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .filter(|s| !s.is_empty())
}

fn invalid(what: impl Into<String>, path: &Path) -> Error {
    Error::new(ErrorKind::InvalidModel, what).with_path(path)
}

/// A token id, or a list of them.
fn ids(value: &Value) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidModel,
                    format!("{v} is not a token id (a whole number, or a list of them)"),
                )
            })
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(many) if many.len() <= 4096 => many.iter().map(one).collect(),
        other => Ok(vec![one(other)?]),
    }
}

/// Whether to add bos and eos. Only the classes of Llama and Gemma read this from the
/// configuration.
fn affixes(config: &Value) -> Option<(bool, bool)> {
    let class = config["tokenizer_class"].as_str()?;
    let (bos, eos) = (
        config["add_bos_token"].as_bool(),
        config["add_eos_token"].as_bool(),
    );
    let has_flags = ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"]
        .iter()
        .any(|c| class.starts_with(c));
    (has_flags && (bos.is_some() || eos.is_some()))
        .then(|| (bos.unwrap_or(true), eos.unwrap_or(false)))
}

/// Adds the tokens that are declared only in `tokenizer_config.json`.
fn add_declared(engine: &mut Engine, declared: &Value) -> Result<()> {
    let Some(declared) = declared.as_object() else {
        return Ok(());
    };
    let mut missing = Vec::new();
    for (id, token) in declared {
        let (Ok(id), Some(content)) = (id.parse::<u32>(), token_name(token)) else {
            continue;
        };
        if engine.token_to_id(content).is_none() {
            let flag = |name: &str| token[name].as_bool().unwrap_or(false);
            let added = AddedToken::from(content, flag("special"))
                .single_word(flag("single_word"))
                .lstrip(flag("lstrip"))
                .rstrip(flag("rstrip"))
                .normalized(flag("normalized"));
            missing.push((id, added));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    for (id, token) in missing {
        let content = token.content.clone();
        guarded("add token", || engine.add_tokens([token]))?;
        if engine.token_to_id(&content) != Some(id) {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "added_tokens_decoder gives {content:?} the id {id}, which does not follow the vocabulary of tokenizer.json"
                ),
            ));
        }
    }
    Ok(())
}

/// Checks that a post-processor adds only tokens that it defines.
fn check_template(processor: &Value) -> Result<()> {
    for inner in processor["processors"].as_array().into_iter().flatten() {
        check_template(inner)?;
    }
    for piece in processor["single"].as_array().into_iter().flatten() {
        let token = piece["SpecialToken"]["id"].as_str();
        let sequence = piece["Sequence"]["id"].as_str();
        if token.is_some_and(|t| processor["special_tokens"][t].is_null())
            || sequence.is_some_and(|s| s != "A")
        {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!("the post-processor puts {piece} around a text, which it does not define"),
            ));
        }
    }
    Ok(())
}

/// The parts of a `tokenizer.json` that are checked before it is loaded.
#[derive(Deserialize)]
struct Outline {
    model: ModelOutline,
    #[serde(default)]
    added_tokens: Option<Vec<AddedOutline>>,
    // These fields are parsed here, because the crate panics if they are not JSON.
    #[serde(default, rename = "normalizer")]
    _normalizer: Value,
    #[serde(default, rename = "pre_tokenizer")]
    _pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

#[derive(Deserialize)]
struct AddedOutline {
    content: String,
}

#[derive(Deserialize)]
struct ModelOutline {
    #[serde(default)]
    vocab: VocabOutline,
    #[serde(default)]
    merges: Option<Vec<MergeOutline>>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum MergeOutline {
    Spaced(String),
    Pair(String, String),
}

/// A vocabulary. For BPE, names with ids; for Unigram, only the number of names with scores.
#[derive(Default)]
struct VocabOutline {
    ids: HashMap<String, u32>,
    listed: usize,
}

impl<'de> Deserialize<'de> for VocabOutline {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = VocabOutline;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            fn visit_unit<E>(self) -> Result<VocabOutline, E> {
                Ok(VocabOutline::default())
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabOutline, A::Error> {
                let mut vocab = VocabOutline::default();
                while let Some((token, id)) = map.next_entry()? {
                    vocab.ids.insert(token, id);
                }
                Ok(vocab)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<VocabOutline, A::Error> {
                let mut vocab = VocabOutline::default();
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    vocab.listed += 1;
                }
                Ok(vocab)
            }
        }
        deserializer.deserialize_any(Read)
    }
}

impl Outline {
    fn check(&self, limits: &TextLimits) -> Result<()> {
        let bad = |what: String| Err(Error::new(ErrorKind::InvalidModel, what));
        let vocab = &self.model.vocab;
        let added = self.added_tokens.as_deref().unwrap_or_default();
        let count = vocab.ids.len() + vocab.listed + added.len();
        if count > limits.vocab {
            return bad(format!(
                "the vocabulary has {count} tokens; at most {} are read",
                limits.vocab
            ));
        }
        if vocab.ids.is_empty() && vocab.listed == 0 {
            return bad("the vocabulary is empty".to_owned());
        }
        let names = vocab.ids.keys().chain(added.iter().map(|t| &t.content));
        if let Some(long) = names
            .map(String::len)
            .filter(|n| *n > limits.token_bytes)
            .max()
        {
            return bad(format!(
                "a token has {long} bytes; at most {} are read",
                limits.token_bytes
            ));
        }
        let mut by_id = vec![false; count];
        for (token, id) in &vocab.ids {
            if let Some(used) = usize::try_from(*id).ok().and_then(|id| by_id.get_mut(id))
                && std::mem::replace(used, true)
            {
                return bad(format!(
                    "id {id} is given twice, the second time to {token:?}"
                ));
            }
        }
        check_template(&self.post_processor)?;
        self.check_merges(limits)
    }

    fn check_merges(&self, limits: &TextLimits) -> Result<()> {
        let bad = |what: String| Err(Error::new(ErrorKind::InvalidModel, what));
        let vocab = &self.model.vocab.ids;
        let merges = self.model.merges.as_deref().unwrap_or_default();
        if merges.len() > limits.merges {
            return bad(format!(
                "{} merge rules; at most {} are read",
                merges.len(),
                limits.merges
            ));
        }
        let prefix = self
            .model
            .continuing_subword_prefix
            .as_deref()
            .unwrap_or_default();
        let mut merged = String::new();
        for (n, merge) in merges.iter().enumerate() {
            let (left, right) = match merge {
                MergeOutline::Pair(left, right) => (left.as_str(), right.as_str()),
                // The crate skips this header line.
                MergeOutline::Spaced(line) if line.starts_with("#version") => continue,
                MergeOutline::Spaced(line) => match line.split_once(' ') {
                    Some(pair) => pair,
                    None => return bad(format!("merge rule {n} is no pair: {line:?}")),
                },
            };
            let Some(end) = right.strip_prefix(prefix) else {
                return bad(format!(
                    "merge rule {n}: {right:?} lacks the prefix {prefix:?}"
                ));
            };
            merged.clear();
            merged.push_str(left);
            merged.push_str(end);
            if let Some(missing) = [left, right, &merged]
                .into_iter()
                .find(|t| !vocab.contains_key(*t))
            {
                return bad(format!(
                    "merge rule {n} ({left:?} {right:?}) needs {missing:?}, which the vocabulary lacks"
                ));
            }
        }
        Ok(())
    }
}
