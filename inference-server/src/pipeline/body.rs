//! Reads request bodies within limits. A queue place and the memory of the parsed values are
//! reserved before parsing.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, IgnoredAny, SeqAccess, Visitor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::prepare;
use crate::engine::Places;
use crate::error::ApiError;
use crate::limits::Limits;
use crate::measure::Measure;
use crate::state::App;

/// A body above this size is parsed on another thread. A request without a place must not exceed
/// this size.
const SMALL: usize = 64 << 10;

/// The JSON body of a request, with the reserved place. The place also owns the memory reservation
/// of the parsed values.
pub(crate) struct Work<T>(pub(crate) T, pub(crate) Places);

/// The JSON body of a request that may have no prompt, and then only loads or unloads a model. Such
/// a request is small and needs no place in the queue, so a full queue does not refuse it.
pub(crate) struct Maybe<T> {
    pub(crate) request: T,
    /// The place, if the request has a prompt.
    pub(crate) places: Option<Places>,
    /// The memory reservation of the parsed values, if the request has no prompt.
    pub(crate) _held: Option<OwnedSemaphorePermit>,
}

/// The JSON body of a small request, which needs no place in the queue.
pub(crate) struct Json<T>(pub(crate) T);

pub(crate) fn body_too_large(most: usize) -> ApiError {
    too_large(format!("the body is larger than {most} bytes"))
}

fn too_large(message: String) -> ApiError {
    let kind = "invalid_request_error";
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, kind, message).with_code("body_too_large")
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Work<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (body, permit) = read_in_time(app, request, app.limits.body_bytes).await?;
        work(app, body, permit).await
    }
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Maybe<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (body, permit) = read_in_time(app, request, app.limits.body_bytes).await?;
        if body.len() <= SMALL && measured(&body, &app.limits).is_ok() && asks_nothing(&body) {
            prepare::goes_on(app)?;
            let (request, permit) = values(app, &body, permit)?;
            return Ok(Maybe {
                request,
                places: None,
                _held: permit,
            });
        }
        let Work(request, places) = work(app, body, permit).await?;
        Ok(Maybe {
            request,
            places: Some(places),
            _held: None,
        })
    }
}

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let most = app.limits.body_bytes.min(SMALL);
        let (body, permit) = read_in_time(app, request, most).await?;
        values(app, &body, permit).map(|(value, _)| Json(value))
    }
}

/// Reserves a place, and then parses a body.
async fn work<T: DeserializeOwned + Send + 'static>(
    app: &App,
    body: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
) -> Result<Work<T>, ApiError> {
    let places = prepare::reserve(app, 1)?;
    let app = app.clone();
    let is_small = body.len() <= SMALL;
    // The closure continues even if the client disconnects, so it owns the reserved memory.
    let read = move || {
        let (value, permit) = values(&app, &body, permit)?;
        Ok(Work(value, places.holding(permit)))
    };
    if is_small {
        return read();
    }
    let done = tokio::task::spawn_blocking(read).await;
    done.unwrap_or_else(|e| {
        tracing::error!("reading a body failed: {e}");
        Err(ApiError::internal())
    })
}

/// Whether an Ollama body has neither prompt nor messages. The function decides without storing
/// values.
fn asks_nothing(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Asked {
        #[serde(default)]
        prompt: Nothing,
        #[serde(default)]
        messages: Nothing,
    }
    let asked = serde_json::from_slice::<Asked>(body);
    asked.is_ok_and(|asked| asked.prompt.0 && asked.messages.0)
}

/// Whether a text or list is empty.
struct Nothing(bool);

impl Default for Nothing {
    fn default() -> Self {
        Self(true)
    }
}

impl<'de> Deserialize<'de> for Nothing {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Nothing;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list")
            }
            fn visit_str<E>(self, text: &str) -> Result<Nothing, E> {
                Ok(Nothing(text.is_empty()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Nothing, A::Error> {
                let mut empty = true;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    empty = false;
                }
                Ok(Nothing(empty))
            }
        }
        from.deserialize_any(Look)
    }
}

async fn read_in_time(
    app: &App,
    request: Request,
    most: usize,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
    let read = read_body(app, request.into_body(), most);
    let read = tokio::time::timeout(app.limits.body_timeout, read).await;
    read.map_err(|_| {
        let message = "the body took too long to arrive";
        let kind = "invalid_request_error";
        ApiError::new(StatusCode::REQUEST_TIMEOUT, kind, message)
    })?
}

/// Reserves `bytes` of the memory for request bodies, and adds the permit to `total`.
///
/// # Errors
/// [`ApiError::busy`] if not enough memory is free.
fn hold(
    bodies: &Arc<Semaphore>,
    total: &mut Option<OwnedSemaphorePermit>,
    bytes: usize,
) -> Result<(), ApiError> {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    let permit = Arc::clone(bodies).try_acquire_many_owned(bytes);
    let permit = permit.map_err(|_| ApiError::busy())?;
    match total {
        Some(total) => total.merge(permit),
        None => *total = Some(permit),
    }
    Ok(())
}

/// Reads a body. The total size of all bodies is limited, too. Only received bytes count, not the
/// announced size, so a slow client cannot block others.
async fn read_body(
    app: &App,
    mut body: Body,
    most: usize,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
    let (mut bytes, mut permit) = (Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let cut = |_| ApiError::invalid("the body ended before it was complete");
        let Ok(data) = frame.map_err(cut)?.into_data() else {
            continue;
        };
        if data.len() > most.saturating_sub(bytes.len()) {
            return Err(body_too_large(most));
        }
        hold(&app.bodies, &mut permit, data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, permit))
}

/// Parses a body, after reserving the memory of its values.
fn values<T: DeserializeOwned>(
    app: &App,
    body: &[u8],
    mut permit: Option<OwnedSemaphorePermit>,
) -> Result<(T, Option<OwnedSemaphorePermit>), ApiError> {
    let limits = &app.limits;
    let weight = measured(body, limits)?.weight();
    if weight.saturating_add(body.len()) > limits.all_bodies_bytes {
        return Err(too_large(String::from(
            "the body has more values than this server has memory for",
        )));
    }
    hold(&app.bodies, &mut permit, weight)?;
    Ok((parse(body)?, permit))
}

fn measured(body: &[u8], limits: &Limits) -> Result<Measure, ApiError> {
    Measure::from_json(body, limits).map_err(|e| ApiError::invalid(format!("the body has {e}")))
}

/// The text, truncated to the length that error messages may quote.
fn short(text: &str) -> String {
    text.chars().take(300).collect()
}

/// Parses JSON. The error names the invalid field.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|e| ApiError::invalid(format!("the body is not UTF-8: {e}")))?;
    // serde would also accept an array of field values in place of the object.
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
    fn requests_for_nothing_are_told_without_their_values() {
        for nothing in [
            "{}",
            r#"{"model": "m", "keep_alive": 0}"#,
            r#"{"prompt": "", "messages": [], "options": {"seed": [1, {}]}}"#,
        ] {
            assert!(asks_nothing(nothing.as_bytes()), "{nothing}");
        }
        for asks in [
            r#"{"prompt": "x"}"#,
            r#"{"messages": [{}]}"#,
            r#"{"prompt": "", "messages": [null]}"#,
            r#"{"prompt": null}"#,
            r#"{"messages": {}}"#,
            // Duplicate fields and malformed JSON are errors.
            r#"{"prompt": "", "prompt": "x"}"#,
            "{",
            "",
        ] {
            assert!(!asks_nothing(asks.as_bytes()), "{asks}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        let error = |text: &str| parse::<Outer>(text.as_bytes()).unwrap_err();
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
        let bad = parse::<Outer>(b"\xff").unwrap_err();
        assert!(bad.message.contains("UTF-8"));
        let limits = Limits {
            json_depth: 8,
            ..Limits::default()
        };
        let deep = measured("[".repeat(9).as_bytes(), &limits).unwrap_err();
        assert!(deep.message.contains("more than 8"));
    }
}
