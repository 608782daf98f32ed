//! Prompts for the text between two others, for models whose vocabulary has the tokens for it.

use inference::{Prompt, TokenModel};
use serde::Deserialize;
use utoipa::ToSchema;

use super::prepare;
use crate::engine::Places;
use crate::error::ApiError;
use crate::models::{Lease, ServedModel};
use crate::state::App;

/// How a family writes the three parts: what stands before each, in the order in which they come.
struct Format {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    /// The suffix comes first.
    suffix_first: bool,
    /// What stands before the name of another file, and its text after a line feed.
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

/// The tokens that models were trained with, by their model cards.
const FORMATS: [Format; 6] = [
    // Qwen2.5-Coder, Qwen3-Coder, CodeGemma.
    format(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        Some("<|file_sep|>"),
    ),
    // StarCoder, SantaCoder, Granite Code, SmolLM2.
    format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", None),
    // Granite 4, Refact.
    format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None),
    // DeepSeek Coder.
    format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None),
    // GLM-4.
    format(
        "<|code_prefix|>",
        "<|code_suffix|>",
        "<|code_middle|>",
        None,
    ),
    // Codestral; nothing stands before the middle.
    Format {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: "",
        suffix_first: true,
        file: None,
    },
];

/// The id of a special token of this name. Ordinary text is several tokens, or spells itself.
fn special(tokens: &dyn TokenModel, name: &str) -> Option<u32> {
    let ids = tokens.encode(name, false).ok()?;
    match ids.as_slice() {
        [id] => tokens.decode(&ids).ok().filter(|t| t != name).map(|_| *id),
        _ => None,
    }
}

/// Text between two others, and other files.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) prefix: String,
    pub(crate) suffix: String,
    /// Begins the text between them.
    pub(crate) middle: String,
    pub(crate) files: Vec<File>,
}

/// Another file of the project.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct File {
    /// Its name.
    filename: Option<String>,
    /// Its text.
    text: String,
}

/// The ids of a prompt for the text between two others.
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
        // A text of a file is no markup.
        let marked = |id: &&u32| tokens.decode(&[**id]).is_ok_and(|text| text.is_empty());
        match ids.iter().find(marked) {
            None => Ok(ids),
            Some(id) => {
                let message = format!("the text has the special token {id}; take it out");
                Err(ApiError::field(param, message))
            }
        }
    };
    // With what the model wants around a text.
    let mut out = tokens
        .encode("", true)
        .map_err(|e| ApiError::of_engine(&e))?;
    // An end of the text does not belong before it.
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
