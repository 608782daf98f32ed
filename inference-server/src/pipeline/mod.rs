//! The path from a request to its reply, shared by all dialects. It reads bodies within limits,
//! converts prompts to token ids, and returns replies as items.

pub(crate) mod ask;
mod body;
pub(crate) mod choice;
mod either;
pub(crate) mod embeddings;
pub(crate) mod events;
pub(crate) mod infill;
mod items;
pub(crate) mod parameters;
pub(crate) mod prepare;
mod rounds;
pub(crate) mod run;

use crate::error::ApiError;

pub(crate) use body::{Json, Maybe, Work, body_too_large};
pub(crate) use either::{OneOrMore, Prompts, TextOr};

/// Refuses a list with more than `most` elements.
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

/// Types that only describe fields in `/openapi.json`. The handlers read these fields as JSON
/// values or with handwritten deserializers.
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

    /// llama.cpp's object form of a prompt. Only text is supported.
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
