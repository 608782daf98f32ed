//! `/infill`: generates the text between a prefix and a suffix.

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use utoipa::ToSchema;

use super::completion::{self, Sampling};
use crate::error::ApiError;
use crate::pipeline::infill::{File, Parts, prompt};
use crate::pipeline::{Work, at_most};
use crate::state::App;

/// The text before and after a gap, which the reply fills.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InfillRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The text before the gap.
    #[serde(default)]
    input_prefix: String,
    /// The text after the gap.
    #[serde(default)]
    input_suffix: String,
    /// Other files of the project.
    input_extra: Option<Vec<File>>,
    /// The beginning of the text in the gap, which the reply continues.
    #[serde(default)]
    prompt: String,
    #[serde(flatten)]
    rest: Sampling,
}

/// Generates the text between two others.
#[utoipa::path(post, path = "/infill", request_body = InfillRequest, responses(
    (status = 200, description = "a completion, or with `stream` events", content((Object = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid, or the model has no such tokens", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<InfillRequest>,
) -> Result<Response, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let files = request.input_extra.unwrap_or_default();
    at_most("input_extra", files.len(), app.limits.messages)?;
    let parts = Parts {
        prefix: request.input_prefix,
        suffix: request.input_suffix,
        middle: request.prompt,
        files,
    };
    let (places, prompt) = prompt(&app, model, places, "input_prefix", parts).await?;
    completion::answer(&app, model, places, vec![prompt], false, &request.rest).await
}
