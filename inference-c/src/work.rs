//! The work of the C functions, with Rust types. JSON arguments are still texts here, as C callers
//! pass them.

use inference::bindings::{
    Input, Reply, backend_infos, embed_options, generate_options, load_options, object, prompts,
};
use inference::{Error, ErrorKind, Interrupt, Result, TextModel, Token, TokenModel};
use rust_mlx::hub;
use serde::Serialize;
use serde_json::Value;

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| {
        Error::new(ErrorKind::Engine, "the result cannot be written as JSON").with_source(e)
    })
}

fn parsed(name: &str, text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| invalid(format!("{name} is not JSON")).with_source(e))
}

pub(crate) fn backends() -> Result<String> {
    json(&backend_infos())
}

pub(crate) fn load(
    model: &str,
    backend: Option<&str>,
    options: &str,
) -> Result<Box<dyn TextModel>> {
    let mut options = load_options(&object("options", options)?)?;
    if let Some(backend) = backend {
        if options.backend.is_some() {
            return Err(invalid(
                "the backend is given twice, as an argument and as an option; leave one out",
            ));
        }
        options.backend = Some(backend.to_owned());
    }
    hub::load(Some(model), &options, &mut hub::Silent)
}

pub(crate) fn info(model: &dyn TextModel) -> Result<String> {
    json(&model.info())
}

fn tokens(model: &dyn TextModel) -> Result<&dyn TokenModel> {
    model.as_token_model().ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            "this backend does not give access to the tokenizer",
        )
    })
}

pub(crate) fn tokenize(model: &dyn TextModel, text: &str, add_special: bool) -> Result<Vec<u32>> {
    tokens(model)?.encode(text, add_special)
}

pub(crate) fn detokenize(model: &dyn TextModel, ids: &[u32]) -> Result<String> {
    tokens(model)?.decode(ids)
}

/// The input of a reply: a text, or JSON that [`Input::from_json`] reads.
pub(crate) enum Asked<'a> {
    Text(&'a str),
    Json(&'a str),
}

pub(crate) fn generate(
    model: &dyn TextModel,
    asked: &Asked<'_>,
    options: &str,
    on_token: impl FnMut(&Token) -> bool,
) -> Result<String> {
    let options = generate_options(&object("options", options)?)?;
    let input = match asked {
        Asked::Text(text) => Input::Prompt((*text).into()),
        Asked::Json(text) => Input::from_json(parsed("messages", text)?)?,
    };
    let stream = input.start(model, &options)?;
    json(&Reply::collect(stream, on_token)?)
}

/// The vectors of the texts, one after another, and the elements of each.
pub(crate) fn embed(
    model: &dyn TextModel,
    texts: &str,
    options: &str,
) -> Result<(Vec<f32>, usize, usize)> {
    let options = embed_options(&object("options", options)?)?;
    let texts = prompts(parsed("texts", texts)?)?;
    let embedding = model.as_embedding_model().ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            "this backend does not embed texts with this model",
        )
    })?;
    let vectors = embedding.embed(&texts, &options, &Interrupt::new())?;
    let dimensions = vectors.first().map_or(0, Vec::len);
    Ok((vectors.concat(), vectors.len(), dimensions))
}
