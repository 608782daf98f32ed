//! What the APIs share: bodies that are read within bounds, and requests on their way through the
//! engine. The directories have one family each.

pub(crate) mod anthropic;
mod body;
pub(crate) mod choice;
mod either;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod prepare;
pub(crate) mod run;
pub(crate) mod status;

use inference::SamplingOptions;

use crate::error::ApiError;

pub(crate) use body::{Json, Maybe, Work, body_too_large};
pub(crate) use either::{OneOrMore, Prompts, TextOr};

/// Refuses a list that is too long.
pub(crate) fn at_most(param: &str, n: usize, most: usize) -> Result<(), ApiError> {
    if n > most {
        return Err(ApiError::field(
            param,
            format!("{param} has {n} elements; at most {most} are allowed"),
        ));
    }
    Ok(())
}

/// Refuses a number that is out of bounds.
pub(crate) fn within(param: &str, value: f32, least: f32, most: f32) -> Result<(), ApiError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ApiError::field(
        param,
        format!("{param} is {value}; it must lie between {least} and {most}"),
    ))
}

/// Sets temperature, from 0 to `most`, and top-p. Errors name the fields with `prefix`.
pub(crate) fn randomness(
    sampling: &mut SamplingOptions,
    prefix: &str,
    (temperature, most): (f32, f32),
    top_p: Option<f32>,
) -> Result<(), ApiError> {
    within(&format!("{prefix}temperature"), temperature, 0.0, most)?;
    sampling.temperature = temperature;
    if let Some(top_p) = top_p {
        within(&format!("{prefix}top_p"), top_p, 0.0, 1.0)?;
        if top_p == 0.0 {
            // The limit of ever smaller ones: only the best is left.
            sampling.temperature = 0.0;
        } else {
            sampling.top_p = top_p;
        }
    }
    Ok(())
}

/// Types of fields that are read as JSON values or by hand, for the description of the API.
#[allow(dead_code, reason = "only described")]
pub(crate) mod described {
    use serde::Deserialize;
    use serde_json::{Map, Value};
    use utoipa::ToSchema;

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum BoolOrText {
        Bool(bool),
        Text(String),
    }

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum NumberOrText {
        Number(f64),
        Text(String),
    }

    /// One text or several.
    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum OneOrMore {
        One(String),
        More(Vec<String>),
    }

    /// A prompt as clients write it.
    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum OnePrompt {
        Text(String),
        Ids(Vec<u32>),
        Object(PromptObject),
    }

    /// llama.cpp's form of a prompt that may have more than text; here it has text alone.
    #[derive(Deserialize, ToSchema)]
    pub(crate) struct PromptObject {
        prompt_string: String,
    }

    /// Prompts as clients write them.
    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum Prompts {
        One(OnePrompt),
        More(Vec<OnePrompt>),
    }

    /// An object, or a list of objects.
    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum ObjectOrList {
        #[schema(value_type = Object)]
        Object(Map<String, Value>),
        #[schema(value_type = Vec<Object>)]
        List(Vec<Map<String, Value>>),
    }

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum TextOrList {
        Text(String),
        #[schema(value_type = Vec<Object>)]
        List(Vec<Map<String, Value>>),
    }

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum TextOrObject {
        Text(String),
        #[schema(value_type = Object)]
        Object(Map<String, Value>),
    }

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum ListOrObject {
        #[schema(value_type = Vec<Object>)]
        List(Vec<Map<String, Value>>),
        #[schema(value_type = Object)]
        Object(Map<String, Value>),
    }

    #[derive(Deserialize, ToSchema)]
    #[serde(untagged)]
    pub(crate) enum Biases {
        Pairs(Vec<Vec<Value>>),
        #[schema(value_type = Object)]
        Object(Map<String, Value>),
    }
}
