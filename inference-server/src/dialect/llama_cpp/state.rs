//! `/props` and `/slots`.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::App;

/// Returns the first model, the default parameters and the number of slots.
#[utoipa::path(get, path = "/props", responses((status = 200, description = "what they are", body = Object)))]
pub(crate) async fn props(State(app): State<App>) -> Result<axum::Json<Value>, ApiError> {
    let first = app.models.look(None).await?;
    let model = first.loaded.as_deref();
    let template = model.and_then(|m| m.tokens().ok()?.chat_template());
    Ok(axum::Json(json!({
        "default_generation_settings": {
            "n_ctx": model.and_then(crate::models::ServedModel::context),
            "params": super::completion::defaults(&app)?,
        },
        "total_slots": app.parallel,
        "model_alias": first.name,
        "chat_template": template.unwrap_or_default(),
        "modalities": {"vision": false, "audio": false},
        "build_info": concat!("inference-server ", env!("CARGO_PKG_VERSION")),
        "is_sleeping": model.is_none(),
    })))
}

/// Returns the slots for running requests. Requests are not bound to slots: while `n` requests run
/// or wait, the first `n` slots are reported as busy.
#[utoipa::path(get, path = "/slots", params(("fail_on_no_slot" = Option<String>, Query, description = "an error if all are in use")), responses(
    (status = 200, description = "a list", body = Vec<Object>),
    (status = 503, description = "all are in use, if that was to be an error", body = Object)))]
pub(crate) async fn slots(State(app): State<App>, uri: Uri) -> Result<axum::Json<Value>, ApiError> {
    let (running, most) = (app.engine.in_flight().min(app.parallel), app.parallel);
    let query = uri.query().unwrap_or_default();
    let fails = query
        .split('&')
        .any(|part| part.split_once('=').map_or(part, |(name, _)| name) == "fail_on_no_slot");
    if fails && running == most {
        let message = "no slot is available";
        let kind = "unavailable_error";
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            kind,
            message,
        ));
    }
    let first = app.models.look(None).await?;
    let context = first
        .loaded
        .as_deref()
        .and_then(crate::models::ServedModel::context);
    let slot = |id| {
        json!({
            "id": id,
            "n_ctx": context,
            "is_processing": id < running,
        })
    };
    Ok(axum::Json((0..most).map(slot).collect()))
}
