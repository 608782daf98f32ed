//! Converts a `tokenizer.json` to GGUF metadata. Only byte-level BPE with a pre-tokenizer that GGUF
//! can name is supported.

use std::path::Path;

use inference::{Error, ErrorKind, Result};
use inference_formats::GgufTokenizerParts;
use inference_text::Tokenizer;
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
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

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
    parts.pre = Some(split(&parts, &tokenizer)?.to_owned());
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    to.text(&key("model"), &parts.model);
    to.text(&key("pre"), parts.pre.as_deref().unwrap_or_default());
    to.texts(&key("tokens"), &parts.tokens);
    to.i32s(
        &key("token_type"),
        parts.token_types.as_deref().unwrap_or_default(),
    );
    to.texts(&key("merges"), &parts.merges);
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
    if let Some(template) = &parts.chat_template {
        to.text("tokenizer.chat_template", template);
    }
    Ok(())
}

fn parts(json: &Value, tokenizer: &Tokenizer, rows: usize) -> Result<GgufTokenizerParts> {
    let model = &json["model"];
    if model["type"] != "BPE" || model["byte_fallback"] == true {
        return Err(unsupported(
            "only byte-level BPE tokenizers are exported to GGUF",
        ));
    }
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
        put(id.as_u64(), token, NORMAL)?;
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let token = added["content"].as_str().unwrap_or_default();
        let kind = if added["special"] == true {
            CONTROL
        } else {
            USER_DEFINED
        };
        put(added["id"].as_u64(), token, kind)?;
    }
    let merges = model["merges"].as_array().into_iter().flatten();
    let merges = merges.map(|merge| match merge {
        Value::String(text) => Ok(text.clone()),
        pair => match (pair[0].as_str(), pair[1].as_str()) {
            // GGUF separates the two texts of a merge by a space, so neither may contain one.
            (Some(a), Some(b)) if !a.contains(' ') && !b.contains(' ') => Ok(format!("{a} {b}")),
            _ => Err(unsupported(format!(
                "the merge {pair} cannot be written to GGUF"
            ))),
        },
    });
    let (begins, ends) = tokenizer.affixes();
    let tokens = tokens.into_iter().enumerate();
    Ok(GgufTokenizerParts {
        model: Tokenizer::GGUF_BYTE_LEVEL.to_owned(),
        merges: merges.collect::<Result<_>>()?,
        tokens: tokens
            .map(|(id, token)| token.unwrap_or_else(|| format!("[PAD{id}]")))
            .collect(),
        token_types: Some(types),
        bos_id: tokenizer.bos_id(),
        eos_id: tokenizer.eos_ids().first().copied(),
        pad_id: tokenizer.pad_id(),
        unk_id: tokenizer.unk_id(),
        add_bos: Some(begins),
        add_eos: Some(ends),
        ..GgufTokenizerParts::default()
    })
}

/// The name of the pre-tokenizer. With it, a reader of the file must get the tokens of the model's
/// own tokenizer.
fn split(parts: &GgufTokenizerParts, tokenizer: &Tokenizer) -> Result<&'static str> {
    for name in Tokenizer::GGUF_SPLITS {
        let mut parts = parts.clone();
        parts.pre = Some(name.to_owned());
        let Ok(theirs) = Tokenizer::from_gguf(&parts) else {
            continue;
        };
        let same = |probe: &&str| match (tokenizer.encode(probe, true), theirs.encode(probe, true))
        {
            (Ok(a), Ok(b)) => a == b,
            _ => false,
        };
        if PROBES.iter().all(same) {
            return Ok(name);
        }
    }
    Err(unsupported(format!(
        "the tokenizer splits words in a way that GGUF has no name for among {}",
        Tokenizer::GGUF_SPLITS.join(", ")
    )))
}
