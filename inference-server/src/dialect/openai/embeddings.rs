//! `/v1/embeddings`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use inference::EmbedOptions;
use serde::Serialize;
use serde_json::{Value, json};

use super::types::EmbeddingRequest;
use crate::error::ApiError;
use crate::pipeline::Work;
use crate::pipeline::embeddings::{dimensions, vectors};
use crate::state::App;

/// Embeds texts.
#[utoipa::path(post, path = "/v1/embeddings", request_body = EmbeddingRequest, responses(
    (status = 200, description = "a vector of length one for each text", body = Object),
    (status = 400, description = "the request is not valid", body = Object),
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

/// The answer. It is a struct, because each element as a JSON value would need 32 bytes more.
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
