//! Converts a `tokenizer.json` to GGUF metadata: byte-level BPE with a pre-tokenizer that GGUF can
//! name, and SentencePiece's BPE, for which GGUF has scores instead of merge rules.

use std::collections::HashMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use inference_formats::GgufTokenizerParts;
use inference_text::{Tokenizer, byte_token};
use serde_json::Value;

use super::metadata::Metadata;

/// Texts on which pre-tokenizers differ: digits, contractions, spaces, punctuation, line ends and
/// scripts.
const PROBES: [&str; 9] = [
    "Hello, world! It's 12345 o'clock; we'll see.",
    "  leading and   inner   spaces  ",
    "tabs\tand\n\nnew lines\r\nand more\n   ",
    "3.14159 100000 7 42% $99 a1b22c333",
    "don't CAN'T I'M you'LL camelCase SHOUTING",
    "naïve café Ünïcödé ßtraße e\u{301}",
    "漢字かな交じり文 Привет мир שלום",
    "👩‍👩‍👧 🙂🙃 !!!??? ...---===",
    "fn main() { println!(\"{}\", a_b+c); } // x/y",
];

// The values of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// Writes the tokenizer of the model directory `dir`, whose embedding has `rows` rows.
pub(super) fn write(dir: &Path, rows: usize, to: &mut Metadata) -> Result<()> {
    let path = dir.join("tokenizer.json");
    let read = |path: &Path| -> Result<Value> {
        let text =
            inference_formats::files::read_text(path, inference_formats::files::MAX_TEXT_FILE)?;
        serde_json::from_str(&text).map_err(|e| {
            Error::new(ErrorKind::InvalidModel, format!("not a JSON file: {e}")).with_path(path)
        })
    };
    let json = read(&path)?;
    let tokenizer = Tokenizer::from_dir(dir)?;
    let mut parts = parts(&json, &tokenizer, rows).map_err(|e| e.with_path(&path))?;
    let settings = dir.join("tokenizer_config.json");
    if settings.is_file() {
        let template = &read(&settings)?["chat_template"];
        parts.chat_template = template.as_str().map(str::to_owned);
    }
    let template = dir.join("chat_template.jinja");
    if template.is_file() {
        let text = inference_formats::files::read_text(&template, 16 << 20)?;
        parts.chat_template = Some(text);
    }
    match parts.scores {
        None => parts.pre = Some(split(&parts, &tokenizer)?.to_owned()),
        Some(_) => {
            parts.pre = Some(String::from("default"));
            parts.add_space_prefix = Some(space_prefix(&parts, &tokenizer)?);
        }
    }
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    to.text(&key("model"), &parts.model);
    to.text(&key("pre"), parts.pre.as_deref().unwrap_or_default());
    to.texts(&key("tokens"), &parts.tokens);
    to.i32s(
        &key("token_type"),
        parts.token_types.as_deref().unwrap_or_default(),
    );
    match &parts.scores {
        Some(scores) => to.f32s(&key("scores"), scores),
        None => to.texts(&key("merges"), &parts.merges),
    }
    for (name, id) in [
        ("bos_token_id", parts.bos_id),
        ("eos_token_id", parts.eos_id),
        ("padding_token_id", parts.pad_id),
        ("unknown_token_id", parts.unk_id),
    ] {
        if let Some(id) = id {
            to.u32(&key(name), id);
        }
    }
    to.bool(&key("add_bos_token"), parts.add_bos.unwrap_or(false));
    to.bool(&key("add_eos_token"), parts.add_eos.unwrap_or(false));
    if let Some(space) = parts.add_space_prefix {
        to.bool(&key("add_space_prefix"), space);
    }
    if let Some(template) = &parts.chat_template {
        to.text("tokenizer.chat_template", template);
    }
    Ok(())
}

fn parts(json: &Value, tokenizer: &Tokenizer, rows: usize) -> Result<GgufTokenizerParts> {
    let model = &json["model"];
    if model["type"] != "BPE" {
        return Err(unsupported(
            "only BPE tokenizers are exported to GGUF (byte-level, and SentencePiece's)",
        ));
    }
    let pieces = model["byte_fallback"] == true;
    let mut tokens: Vec<Option<String>> = vec![None; rows];
    let mut types = vec![UNUSED; rows];
    let mut put = |id: Option<u64>, token: &str, kind: i32| {
        let place = id
            .and_then(|id| usize::try_from(id).ok())
            .filter(|id| *id < rows);
        let Some(id) = place else {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!("token {token:?} has no row in an embedding of {rows}"),
            ));
        };
        (tokens[id], types[id]) = (Some(token.to_owned()), kind);
        Ok(())
    };
    for (token, id) in model["vocab"].as_object().into_iter().flatten() {
        let kind = match pieces && byte_token(token).is_some() {
            true => BYTE,
            false => NORMAL,
        };
        put(id.as_u64(), token, kind)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let token = added["content"].as_str().unwrap_or_default();
        let is_unknown = pieces && model["unk_token"] == added["content"];
        let kind = match added["special"] == true {
            _ if is_unknown => UNKNOWN,
            true => CONTROL,
            false => USER_DEFINED,
        };
        put(added["id"].as_u64(), token, kind)?;
    }
    let merges = model["merges"].as_array().into_iter().flatten();
    let merges: Vec<(&str, &str)> = merges.map(pair).collect::<Result<_>>()?;
    let scores = pieces.then(|| scores(&tokens, &types, &merges));
    // GGUF separates the two texts of a merge by a space, so neither may contain one.
    let merges =
        merges
            .iter()
            .filter(|_| !pieces)
            .map(|&(a, b)| match a.contains(' ') || b.contains(' ') {
                true => Err(unsupported(format!(
                    "the merge of {a:?} and {b:?} cannot be written to GGUF"
                ))),
                false => Ok(format!("{a} {b}")),
            });
    // The post-processor of a tokenizer.json adds these tokens, or flags of its class do.
    let [with, without] = [true, false].map(|special| tokenizer.encode("a", special));
    let (with, without) = (with?, without?);
    let (bos, eos) = (tokenizer.bos_id(), tokenizer.eos_ids().first().copied());
    let begins = bos.is_some() && with.first() == bos.as_ref() && without.first() != bos.as_ref();
    let ends = eos.is_some() && with.last() == eos.as_ref() && without.last() != eos.as_ref();
    let tokens = tokens.into_iter().enumerate();
    Ok(GgufTokenizerParts {
        model: match pieces {
            true => Tokenizer::GGUF_PIECES.to_owned(),
            false => Tokenizer::GGUF_BYTE_LEVEL.to_owned(),
        },
        merges: merges.collect::<Result<_>>()?,
        scores,
        tokens: tokens
            .map(|(id, token)| token.unwrap_or_else(|| format!("[PAD{id}]")))
            .collect(),
        token_types: Some(types),
        bos_id: bos,
        eos_id: eos,
        pad_id: tokenizer.pad_id(),
        unk_id: tokenizer.unk_id(),
        add_bos: Some(begins),
        add_eos: Some(ends),
        ..GgufTokenizerParts::default()
    })
}

/// The two texts of a merge rule.
fn pair(rule: &Value) -> Result<(&str, &str)> {
    let pair = match rule {
        Value::String(text) => text.split_once(' '),
        pair => pair[0].as_str().zip(pair[1].as_str()),
    };
    pair.ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidModel,
            format!("the merge {rule} is not a pair of texts"),
        )
    })
}

/// The score of each token. SentencePiece first joins the two adjacent pieces whose union has the
/// highest score, so a token's score falls with the place of the first rule that makes it. No rule
/// makes the other tokens.
fn scores(tokens: &[Option<String>], types: &[i32], merges: &[(&str, &str)]) -> Vec<f32> {
    let mut places = HashMap::new();
    for (left, right) in merges {
        let place = places.len();
        places.entry([*left, *right].concat()).or_insert(place);
    }
    let tokens = tokens.iter().zip(types);
    let score = |(token, kind): (&Option<String>, &i32)| match token {
        Some(token) if [NORMAL, USER_DEFINED].contains(kind) => {
            -(*places.get(token).unwrap_or(&places.len()) as f32)
        }
        _ => 0.0,
    };
    tokens.map(score).collect()
}

/// Whether a reader of the file gets the tokens of the model's own tokenizer for all probes.
fn reads_alike(parts: &GgufTokenizerParts, tokenizer: &Tokenizer) -> bool {
    let Ok(theirs) = Tokenizer::from_gguf(parts) else {
        return false;
    };
    let same = |probe: &str| match (tokenizer.encode(probe, true), theirs.encode(probe, true)) {
        (Ok(own), Ok(read)) => own == read,
        _ => false,
    };
    // Readers may treat spaces beside a special token differently.
    let end = parts.eos_id.and_then(|id| parts.tokens.get(id as usize));
    let marked = end.map(|end| format!("a{end}b {end} c{end}"));
    PROBES.iter().copied().chain(marked.as_deref()).all(same)
}

/// Whether a reader of the file adds a space before a text, as the model's own tokenizer.
fn space_prefix(parts: &GgufTokenizerParts, tokenizer: &Tokenizer) -> Result<bool> {
    let alike = |space: &bool| {
        let mut parts = parts.clone();
        parts.add_space_prefix = Some(*space);
        reads_alike(&parts, tokenizer)
    };
    [true, false].into_iter().find(alike).ok_or_else(|| {
        unsupported("the tokenizer has byte tokens, but does not split text as SentencePiece")
    })
}

/// The name of the pre-tokenizer. With it, a reader of the file must get the tokens of the model's
/// own tokenizer.
fn split(parts: &GgufTokenizerParts, tokenizer: &Tokenizer) -> Result<&'static str> {
    for name in Tokenizer::GGUF_SPLITS {
        let mut parts = parts.clone();
        parts.pre = Some(name.to_owned());
        if reads_alike(&parts, tokenizer) {
            return Ok(name);
        }
    }
    Err(unsupported(format!(
        "the tokenizer splits words in a way that GGUF has no name for among {}",
        Tokenizer::GGUF_SPLITS.join(", ")
    )))
}
