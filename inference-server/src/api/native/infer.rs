//! `/v1/infer`: what a model expects next.

use std::time::Instant;

use axum::extract::State;
use inference::{GenerateOptions, Prompt};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::run::{self, Reply};
use crate::api::{Json, prepare};
use crate::app::App;
use crate::error::ApiError;

/// A text whose next token is asked for.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InferRequest {
    /// The model's name; without one, the first that is served.
    model: Option<String>,
    /// The text.
    #[serde(default)]
    prompt: String,
    /// How many predictions, 5 by default.
    top: Option<usize>,
    /// Only `dense`, the model's own forward pass.
    mode: Option<String>,
}

/// The most probable next tokens of a text, with their probabilities.
#[utoipa::path(post, path = "/v1/infer", request_body = InferRequest, responses(
    (status = 200, description = "`predictions`", body = Object),
    (status = 400, description = "the request cannot be served as it is", body = Object),
    (status = 504, description = "it took too long", body = Object)))]
pub(crate) async fn infer(
    State(app): State<App>,
    Json(request): Json<InferRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let arrived = Instant::now();
    match request.mode.as_deref() {
        None | Some("dense") => {}
        Some(mode) => {
            let shown: String = mode.chars().take(40).collect();
            return Err(ApiError::unsupported(
                "mode",
                format!("the mode {shown:?} is not supported; use \"dense\""),
            ));
        }
    }
    let (top, most) = (request.top.unwrap_or(5), app.limits.top_logprobs);
    if top == 0 || top > most {
        let message = format!("top is {top}; it must lie between 1 and {most}");
        return Err(ApiError::field("top", message));
    }
    if request.prompt.trim().is_empty() {
        return Err(ApiError::field("prompt", "the prompt is empty"));
    }
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let mut options = GenerateOptions::new().with_max_tokens(1);
    options.output.logprobs = crate::api::openai::chat::with_logprobs(model, Some(top))?;
    // A text may end here, too: then the end is the token.
    options.stop.ignore_eos = true;
    let options = prepare::finish_options(&app, options, arrived)?;
    let places = prepare::reserve(&app, 1)?;
    let prompts = vec![Prompt::from(request.prompt.as_str())];
    let (place, mut all) = prepare::raw(&app, model, places, "prompt", prompts).await?;
    let prepared = all.pop().ok_or_else(ApiError::internal)?;
    let reply = Reply::start(&app, model, place, &prepared, options, arrived);
    let whole = run::whole(reply).await?;
    let logprobs = whole.tokens.first().and_then(|t| t.logprobs.as_ref());
    let logprobs = logprobs.ok_or_else(ApiError::internal)?;
    let predictions: Vec<Value> = logprobs
        .top
        .iter()
        .map(|t| {
            let probability = (f64::from(t.logprob).exp() * 1e4).round() / 1e4;
            json!({"token": t.text, "probability": probability})
        })
        .collect();
    let milliseconds = arrived.elapsed().as_secs_f64() * 1e3;
    Ok(axum::Json(json!({
        "prompt": request.prompt,
        "predictions": predictions,
        "mode": "dense",
        "latency_ms": (milliseconds * 10.0).round() / 10.0,
    })))
}
