//! `/api/embed`.

use std::time::Instant;

use axum::extract::State;
use inference::Prompt;
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::types;
use crate::api::openai::embeddings::vectors;
use crate::api::{OneOrMore, Work};
use crate::app::App;
use crate::error::ApiError;

/// Texts to make vectors of. A text beyond the context is an error, whatever `truncate` says.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbedRequest {
    /// The model's name.
    model: Option<String>,
    /// A text, or several.
    #[schema(value_type = crate::api::described::OneOrMore)]
    input: OneOrMore,
    /// Only the model's own number of elements.
    dimensions: Option<usize>,
    /// How long the model stays loaded after this.
    #[schema(value_type = Option<crate::api::described::NumberOrText>)]
    keep_alive: Option<Value>,
}

/// A text to make a vector of, in the older form.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OldEmbedRequest {
    /// The model's name.
    model: Option<String>,
    /// The text.
    prompt: String,
    /// How long the model stays loaded after this.
    #[schema(value_type = Option<crate::api::described::NumberOrText>)]
    keep_alive: Option<Value>,
}

/// Makes a vector of a text, in the older form.
#[utoipa::path(post, path = "/api/embeddings", request_body = OldEmbedRequest, responses(
    (status = 200, description = "`embedding`, a vector of length one", body = Object),
    (status = 400, description = "the request cannot be served as it is", body = Object)))]
pub(crate) async fn create_old(
    State(app): State<App>,
    Work(request, places): Work<OldEmbedRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let keep = types::keep_alive(request.keep_alive.as_ref())?;
    let model = &app.models.get(request.model.as_deref(), keep).await?;
    let text = Prompt::from(request.prompt);
    let (vectors, _) = vectors(&app, model, places, vec![text]).await?;
    Ok(axum::Json(json!({"embedding": vectors.first()})))
}

/// Makes vectors of texts.
#[utoipa::path(post, path = "/api/embed", request_body = EmbedRequest, responses(
    (status = 200, description = "a vector of length one for each text", body = Object),
    (status = 400, description = "the request cannot be served as it is", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<EmbedRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let started = Instant::now();
    let keep = types::keep_alive(request.keep_alive.as_ref())?;
    let model = &app.models.get(request.model.as_deref(), keep).await?;
    let size = model.info().hidden_size;
    if let Some(n) = request.dimensions.filter(|n| *n != size) {
        return Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is {n}; vectors of this model have {size} elements"),
        ));
    }
    let texts = request.input.list().into_iter().map(Prompt::from).collect();
    let (vectors, tokens) = vectors(&app, model, places, texts).await?;
    let total = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(axum::Json(json!({
        "model": model.id(),
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}
