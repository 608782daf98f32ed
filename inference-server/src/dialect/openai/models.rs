//! `/v1/models`.

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::models::{Listed, ServedModel};
use crate::state::App;

fn model(listed: &Listed) -> Value {
    let loaded = listed.loaded.as_deref();
    let modified = listed.entry.as_ref().map_or(0, |e| e.modified);
    json!({
        "id": listed.name,
        "object": "model",
        "created": loaded.map_or(modified, ServedModel::created),
        "owned_by": "local",
        "max_model_len": loaded.and_then(ServedModel::context),
    })
}

/// The models that are served.
#[utoipa::path(get, path = "/v1/models", responses((status = 200, description = "a list", body = Object)))]
pub(crate) async fn list(State(app): State<App>) -> axum::Json<Value> {
    let data: Vec<Value> = app.models.list().await.iter().map(model).collect();
    axum::Json(json!({"object": "list", "data": data}))
}

/// One of the models that are served.
#[utoipa::path(get, path = "/v1/models/{*id}", params(("id" = String, Path, description = "the model's name")), responses(
    (status = 200, description = "the model", body = Object),
    (status = 404, description = "it is not served", body = Object)))]
pub(crate) async fn one(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<axum::Json<Value>, ApiError> {
    let entry = app.models.look(Some(&id)).await?;
    Ok(axum::Json(model(&entry)))
}
