//! `/api/embed`.

use std::time::Instant;

use axum::extract::State;
use inference::Prompt;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::openai::embeddings::vectors;
use crate::api::{Json, OneOrMore};
use crate::app::App;
use crate::error::ApiError;

/// Texts to make vectors of. A text beyond the context is an error, whatever `truncate` says.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbedRequest {
    /// The model's name.
    model: Option<String>,
    /// A text, or several.
    input: OneOrMore,
    /// Only the model's own number of elements.
    dimensions: Option<usize>,
}

/// Makes vectors of texts.
#[utoipa::path(post, path = "/api/embed", request_body = EmbedRequest, responses(
    (status = 200, description = "a vector of length one for each text", body = Object),
    (status = 400, description = "the request cannot be served as it is", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Json(request): Json<EmbedRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let started = Instant::now();
    let (at, model) = app.models.find(request.model.as_deref())?;
    let size = model.info().hidden_size;
    if let Some(n) = request.dimensions.filter(|n| *n != size) {
        return Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is {n}; vectors of this model have {size} elements"),
        ));
    }
    let texts = request.input.list().into_iter().map(Prompt::from).collect();
    let (vectors, tokens) = vectors(&app, at, texts).await?;
    let total = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(axum::Json(json!({
        "model": model.id(),
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}
