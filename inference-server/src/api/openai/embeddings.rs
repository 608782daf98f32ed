//! `/v1/embeddings`.

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use inference::{CancelToken, EmbedOptions, Interrupt, Prompt};
use serde::Serialize;
use serde_json::{Value, json};

use super::types::EmbeddingRequest;
use crate::api::{Work, at_most, prepare};
use crate::app::App;
use crate::engine::{EmbedJob, Places};
use crate::error::ApiError;
use crate::models::Lease;

/// Raises the token when the client leaves.
pub(crate) struct Leaves(pub(crate) CancelToken);

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Vectors of texts, and how many tokens these have.
pub(crate) async fn vectors(
    app: &App,
    model: &Lease,
    places: Places,
    prompts: Vec<Prompt>,
    options: EmbedOptions,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let arrived = Instant::now();
    if !model.capabilities().embeddings {
        return Err(prepare::no_embeddings(model));
    }
    // As all servers of these APIs do.
    let options = options.with_normalize(true);
    at_most("input", prompts.len(), app.limits.embedding_inputs)?;
    if prompts.is_empty() {
        return Err(ApiError::field("input", "there is no input"));
    }
    let texts = ("input", prompts);
    let (place, ids) = prepare::texts(app, model, places, texts, options.clone()).await?;
    let tokens = ids.iter().map(Vec::len).sum();
    let cancel = Leaves(CancelToken::new());
    let interrupt = Interrupt::new()
        .with_cancel(cancel.0.clone())
        .with_deadline(arrived + app.limits.request_timeout);
    let job = EmbedJob {
        model: model.clone(),
        prompts: ids,
        options,
        interrupt,
        _place: place,
    };
    let vectors = app.engine.embed(job).await;
    let vectors = vectors.map_err(|_| ApiError::internal())?;
    let vectors = vectors.map_err(|e| ApiError::of_engine(&e))?;
    // JSON has no such numbers.
    if vectors.iter().flatten().any(|v| !v.is_finite()) {
        tracing::error!("a vector of {} holds what is no number", model.id());
        return Err(ApiError::internal());
    }
    Ok((vectors, tokens))
}

/// The number of elements that a request asks for, which the model must have.
pub(crate) fn dimensions(model: &Lease, asked: Option<usize>) -> Result<Option<usize>, ApiError> {
    let Some(embedder) = model.model().as_embedding_model() else {
        return Ok(asked);
    };
    let size = embedder.embedding_info().dimensions;
    match asked {
        Some(n) if n == 0 || n > size => Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is {n}; vectors of this model have {size} elements"),
        )),
        _ => Ok(asked),
    }
}

/// Makes vectors of texts.
#[utoipa::path(post, path = "/v1/embeddings", request_body = EmbeddingRequest, responses(
    (status = 200, description = "a vector of length one for each text", body = Object),
    (status = 400, description = "the request cannot be served as it is", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<EmbeddingRequest>,
) -> Result<Response, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let base64 = match request.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            return Err(ApiError::field(
                "encoding_format",
                format!("encoding_format is {shown:?}; it must be \"float\" or \"base64\""),
            ));
        }
    };
    let options = EmbedOptions::new().with_dimensions(dimensions(model, request.dimensions)?);
    let (vectors, tokens) = vectors(&app, model, places, request.input.list(), options).await?;
    let data = vectors
        .into_iter()
        .enumerate()
        .map(|(index, vector)| Item {
            object: "embedding",
            index,
            embedding: match base64 {
                true => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                    Vector::Base64(STANDARD.encode(bytes))
                }
                false => Vector::Floats(vector),
            },
        })
        .collect();
    let body = Embeddings {
        object: "list",
        data,
        model: model.id(),
        usage: json!({"prompt_tokens": tokens, "total_tokens": tokens}),
    };
    Ok(axum::Json(body).into_response())
}

/// The answer, typed: as JSON values, each number would take 32 bytes more.
#[derive(Serialize)]
struct Embeddings<'a> {
    object: &'static str,
    data: Vec<Item>,
    model: &'a str,
    usage: Value,
}

#[derive(Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    Base64(String),
}
