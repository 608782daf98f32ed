//! `/api/delete`, `/api/copy` and `/api/create`. Deletion works for some models. The other two
//! routes always return an error that explains the alternative.

use axum::extract::State;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::pipeline::Json;
use crate::state::App;

/// The model to delete.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DeleteRequest {
    /// The model's name.
    #[serde(alias = "name")]
    model: Option<String>,
}

/// Deletes a model's files, if the server was started to allow it. The answer has no body.
#[utoipa::path(delete, path = "/api/delete", request_body = DeleteRequest, responses(
    (status = 200, description = "it is deleted"),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 403, description = "this server deletes no models", body = Object),
    (status = 404, description = "it is not served", body = Object),
    (status = 409, description = "its replies still run", body = Object)))]
pub(crate) async fn delete(
    State(app): State<App>,
    Json(request): Json<DeleteRequest>,
) -> Result<(), ApiError> {
    let name = request.model.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| {
        ApiError::field(
            "model",
            "model is missing; give the name of the model to delete",
        )
    })?;
    app.models.delete(&name).await
}

/// The model to copy.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CopyRequest {
    /// The model's name.
    source: Option<String>,
    /// The name of the copy.
    destination: Option<String>,
}

/// Refuses to copy a model: a served model has the name of its files.
#[utoipa::path(post, path = "/api/copy", request_body = CopyRequest, responses(
    (status = 400, description = "models are not copied", body = Object),
    (status = 404, description = "it is not served", body = Object)))]
pub(crate) async fn copy(
    State(app): State<App>,
    Json(request): Json<CopyRequest>,
) -> Result<(), ApiError> {
    for (name, there) in [
        ("source", &request.source),
        ("destination", &request.destination),
    ] {
        if there.as_deref().unwrap_or_default().is_empty() {
            return Err(ApiError::field(
                name,
                format!("{name} is missing; give the name of a model"),
            ));
        }
    }
    app.models.look(request.source.as_deref()).await?;
    Err(ApiError::unsupported(
        "destination",
        "models are not copied: a served model has the name of its files",
    ))
}

/// The model to create.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CreateRequest {
    /// The new model's name.
    #[serde(alias = "name")]
    model: Option<String>,
    /// The model that it would be made from.
    from: Option<String>,
}

/// Refuses to create a model.
#[utoipa::path(post, path = "/api/create", request_body = CreateRequest, responses(
    (status = 400, description = "models are not made by requests", body = Object)))]
pub(crate) async fn create(Json(request): Json<CreateRequest>) -> Result<(), ApiError> {
    let from = request.from.as_deref().unwrap_or("NAME");
    let from: String = from.chars().take(100).filter(|c| !c.is_control()).collect();
    if request.model.as_deref().unwrap_or_default().is_empty() {
        return Err(ApiError::field(
            "model",
            "model is missing; give the name of the new model",
        ));
    }
    Err(ApiError::unsupported(
        "from",
        format!(
            "models are not made by requests. On the server's machine `mlx convert -m {from} \
             -q` quantizes one, and `mlx create` makes a preset for `mlx run`; a system message, a \
             template and options can be part of each request"
        ),
    ))
}
