//! What the APIs share: bodies that are read within bounds, and requests on their way through the
//! engine. The directories have one family each.

pub(crate) mod anthropic;
pub(crate) mod choice;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod prepare;
pub(crate) mod run;
pub(crate) mod status;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use inference::SamplingOptions;
use serde::de::DeserializeOwned;
use tokio::sync::SemaphorePermit;

use crate::app::App;
use crate::error::ApiError;
use crate::limits::deeper_than;

/// A body of JSON.
pub(crate) struct Json<T>(pub(crate) T);

/// The body is larger than it may be.
pub(crate) fn body_too_large(most: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "invalid_request_error",
        format!("the body is larger than {most} bytes"),
    )
    .with_code("body_too_large")
}

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let limits = &app.limits;
        let read = read_body(app, request.into_body());
        let (body, _held) = tokio::time::timeout(limits.body_timeout, read)
            .await
            .map_err(|_| {
                let message = "the body took too long to arrive";
                let kind = "invalid_request_error";
                ApiError::new(StatusCode::REQUEST_TIMEOUT, kind, message)
            })??;
        parse(&body, limits.json_depth).map(Json)
    }
}

/// Reads a body. The bytes of all bodies together are bounded, too. Received bytes count rather
/// than announced ones, so that a slow client does not keep others out.
async fn read_body<'a>(
    app: &'a App,
    mut body: Body,
) -> Result<(Vec<u8>, Option<SemaphorePermit<'a>>), ApiError> {
    let most = app.limits.body_bytes;
    let (mut bytes, mut held) = (Vec::new(), None::<SemaphorePermit<'a>>);
    while let Some(frame) = body.frame().await {
        let cut = |_| ApiError::invalid("the body ended before it was complete");
        let Ok(data) = frame.map_err(cut)?.into_data() else {
            continue;
        };
        if data.len() > most.saturating_sub(bytes.len()) {
            return Err(body_too_large(most));
        }
        let count = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let permit = app.bodies.try_acquire_many(count);
        let permit = permit.map_err(|_| ApiError::busy())?;
        match &mut held {
            Some(held) => held.merge(permit),
            None => held = Some(permit),
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, held))
}

/// The number of characters of the input that an error may repeat.
fn short(text: &str) -> String {
    text.chars().take(300).collect()
}

/// Reads JSON; an error names the field.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8], depth: usize) -> Result<T, ApiError> {
    if deeper_than(body, depth) {
        return Err(ApiError::invalid(format!(
            "the body has more than {depth} objects and lists within each other"
        )));
    }
    let text = std::str::from_utf8(body)
        .map_err(|e| ApiError::invalid(format!("the body is no UTF-8: {e}")))?;
    // A struct's reader takes a list of the fields' values, too.
    if text.trim_start().starts_with('[') {
        return Err(ApiError::invalid("the body must be an object, not a list"));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        let what = short(&e.inner().to_string());
        let error = ApiError::invalid(format!("the body cannot be used: {what}"));
        match path.as_str() {
            "." | "?" => error,
            _ => error.with_param(short(&path)),
        }
    })?;
    json.end()
        .map_err(|e| ApiError::invalid(format!("the body has more than one value: {e}")))?;
    Ok(value)
}

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

/// One text or several.
#[derive(Debug, Clone, serde::Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub(crate) enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    pub(crate) fn list(&self) -> Vec<String> {
        match self {
            OneOrMore::One(text) => vec![text.clone()],
            OneOrMore::More(texts) => texts.clone(),
        }
    }
}

/// Types of fields that are read as JSON values, for the description of the API.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        #[allow(dead_code)]
        b: Vec<u8>,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Outer {
        #[allow(dead_code)]
        a: Inner,
    }

    #[test]
    fn errors_name_the_field() {
        let error = |text: &str| parse::<Outer>(text.as_bytes(), 8).unwrap_err();
        assert_eq!(
            error(r#"{"a": {"b": [1, "x"]}}"#).param.as_deref(),
            Some("a.b[1]")
        );
        assert_eq!(error("nonsense").param, None);
        assert!(error(r#" [{"b": []}]"#).message.contains("not a list"));
        assert!(error("{} {}").message.contains("missing field"));
        assert!(
            error(r#"{"a": {"b": []}} 1"#)
                .message
                .contains("more than one")
        );
        assert!(error(&"[".repeat(9)).message.contains("more than 8"));
        let bad = parse::<Outer>(b"\xff", 8).unwrap_err();
        assert!(bad.message.contains("UTF-8"));
    }
}
