//! `/api/embed`.

use std::time::Instant;

use axum::extract::State;
use inference::{EmbedOptions, Prompt};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::types;
use crate::error::ApiError;
use crate::pipeline::embeddings::{dimensions, vectors};
use crate::pipeline::{OneOrMore, Work};
use crate::state::App;

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbedRequest {
    /// The model's name.
    model: Option<String>,
    /// A text, or several.
    #[schema(value_type = crate::pipeline::described::OneOrMore)]
    input: OneOrMore,
    /// Return only the first elements of each vector, for models trained for that.
    dimensions: Option<usize>,
    /// Cut a text that is too long (the default), instead of refusing it.
    truncate: Option<bool>,
    /// How long the model stays loaded after this request.
    #[schema(value_type = Option<crate::pipeline::described::NumberOrText>)]
    keep_alive: Option<Value>,
}

/// A text to embed, in the older form.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OldEmbedRequest {
    /// The model's name.
    model: Option<String>,
    /// The text.
    prompt: String,
    /// How long the model stays loaded after this request.
    #[schema(value_type = Option<crate::pipeline::described::NumberOrText>)]
    keep_alive: Option<Value>,
}

/// Embeds a text, in the older form.
#[utoipa::path(post, path = "/api/embeddings", request_body = OldEmbedRequest, responses(
    (status = 200, description = "`embedding`, a vector of length one", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn create_old(
    State(app): State<App>,
    Work(request, places): Work<OldEmbedRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let keep = types::keep_alive(request.keep_alive.as_ref())?;
    let model = &app.models.get(request.model.as_deref(), keep).await?;
    let text = Prompt::from(request.prompt);
    let options = EmbedOptions::new().with_truncate(true);
    let (vectors, _) = vectors(&app, model, places, vec![text], options).await?;
    Ok(axum::Json(json!({"embedding": vectors.first()})))
}

/// Embeds texts.
#[utoipa::path(post, path = "/api/embed", request_body = EmbedRequest, responses(
    (status = 200, description = "a vector of length one for each text", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<EmbedRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let started = Instant::now();
    let keep = types::keep_alive(request.keep_alive.as_ref())?;
    let model = &app.models.get(request.model.as_deref(), keep).await?;
    let options = EmbedOptions::new()
        .with_dimensions(dimensions(model, request.dimensions)?)
        .with_truncate(request.truncate.unwrap_or(true));
    let texts = request.input.list().into_iter().map(Prompt::from).collect();
    let (vectors, tokens) = vectors(&app, model, places, texts, options).await?;
    let total = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(axum::Json(json!({
        "model": model.id(),
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}
