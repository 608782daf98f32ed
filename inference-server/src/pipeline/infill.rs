//! Prompts for text between a prefix and a suffix. The model's vocabulary must have special tokens
//! for this task.

use inference::{Prompt, TokenModel};
use serde::Deserialize;
use utoipa::ToSchema;

use super::prepare;
use crate::engine::Places;
use crate::error::ApiError;
use crate::models::{Lease, ServedModel};
use crate::state::App;

/// The special tokens of a model family that precede the three parts of the prompt.
struct Format {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    /// Whether the prompt has the suffix before the prefix.
    suffix_first: bool,
    /// The token before another file's name. The file's text follows after a line feed.
    file: Option<&'static str>,
}

const fn format(
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    file: Option<&'static str>,
) -> Format {
    Format {
        prefix,
        suffix,
        middle,
        suffix_first: false,
        file,
    }
}

/// The tokens with which models were trained, according to their model cards.
const FORMATS: [Format; 6] = [
    // The tokens of Qwen2.5-Coder, Qwen3-Coder and CodeGemma.
    format(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        Some("<|file_sep|>"),
    ),
    // The tokens of StarCoder, SantaCoder, Granite Code and SmolLM2.
    format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", None),
    // The tokens of Granite 4 and Refact.
    format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None),
    // The tokens of DeepSeek Coder.
    format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None),
    // The tokens of GLM-4.
    format(
        "<|code_prefix|>",
        "<|code_suffix|>",
        "<|code_middle|>",
        None,
    ),
    // The tokens of Codestral, which has no token before the middle.
    Format {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: "",
        suffix_first: true,
        file: None,
    },
];

/// The id of the special token with this name. Ordinary text is different: it encodes to several
/// tokens, or to one that decodes to the text.
fn special(tokens: &dyn TokenModel, name: &str) -> Option<u32> {
    let ids = tokens.encode(name, false).ok()?;
    match ids.as_slice() {
        [id] => tokens.decode(&ids).ok().filter(|t| t != name).map(|_| *id),
        _ => None,
    }
}

/// The texts around a gap, and other files of the project.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) prefix: String,
    pub(crate) suffix: String,
    /// The start of the text to generate, which the reply continues.
    pub(crate) middle: String,
    pub(crate) files: Vec<File>,
}

/// Another file of the project.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct File {
    /// The name.
    filename: Option<String>,
    /// The text.
    text: String,
}

/// The token ids of a prompt for the text between prefix and suffix.
pub(crate) async fn prompt(
    app: &App,
    model: &Lease,
    places: Places,
    param: &'static str,
    parts: Parts,
) -> Result<(Places, Prompt), ApiError> {
    let mut bytes = parts.prefix.len() + parts.suffix.len() + parts.middle.len();
    for file in &parts.files {
        bytes += file.text.len() + file.filename.as_ref().map_or(0, String::len);
    }
    prepare::check_bytes(app, bytes)?;
    let model = model.clone();
    let ids = move || build(&model, param, &parts);
    let (places, ids) = prepare::aside(places, ids).await?;
    Ok((places, Prompt::Tokens(ids)))
}

fn build(model: &ServedModel, param: &'static str, parts: &Parts) -> Result<Vec<u32>, ApiError> {
    let tokens = model.tokens()?;
    let all = |format: &Format| {
        let names = [format.prefix, format.suffix, format.middle];
        let used = names.iter().filter(|name| !name.is_empty());
        used.map(|name| special(tokens, name))
            .collect::<Option<Vec<u32>>>()
    };
    let Some((format, ids)) = FORMATS.iter().find_map(|f| Some((f, all(f)?))) else {
        let message = format!(
            "the model {} has no tokens that mark a text to be filled in",
            model.id()
        );
        return Err(ApiError::unsupported(param, message));
    };
    let encode = |text: &str| {
        let failed = |e: inference::Error| ApiError::of_engine(&e).with_param(param);
        let ids = tokens.encode(text, false).map_err(failed)?;
        // Text of a file must not become special tokens.
        let marked = |id: &&u32| tokens.decode(&[**id]).is_ok_and(|text| text.is_empty());
        match ids.iter().find(marked) {
            None => Ok(ids),
            Some(id) => {
                let message = format!("the text has the special token {id}; remove it");
                Err(ApiError::field(param, message))
            }
        }
    };
    // The model's own start tokens come first.
    let mut out = tokens
        .encode("", true)
        .map_err(|e| ApiError::of_engine(&e))?;
    // Some tokenizers also append an end-of-text token, which would end the prompt before its text.
    let ends = tokens.eos_tokens();
    let starts = out.iter().take_while(|id| !ends.contains(id)).count();
    out.truncate(starts);
    if !parts.files.is_empty() {
        let mark = format.file.and_then(|name| special(tokens, name));
        let Some(mark) = mark else {
            let message = format!("the model {} has no token between files", model.id());
            return Err(ApiError::unsupported("input_extra", message));
        };
        for file in &parts.files {
            out.push(mark);
            let name = file.filename.as_deref().unwrap_or("tmp");
            out.extend(encode(&format!("{name}\n{}", file.text))?);
        }
        out.push(mark);
        out.extend(encode("filename\n")?);
    }
    let (prefix, suffix) = (encode(&parts.prefix)?, encode(&parts.suffix)?);
    if format.suffix_first {
        out.push(ids[1]);
        out.extend(suffix);
        out.push(ids[0]);
        out.extend(prefix);
    } else {
        out.push(ids[0]);
        out.extend(prefix);
        out.push(ids[1]);
        out.extend(suffix);
    }
    out.extend(ids.get(2));
    out.extend(encode(&parts.middle)?);
    Ok(out)
}
