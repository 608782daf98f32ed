//! `/rerank`: it needs models that are made for it, of which none can be loaded here.

use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::Work;
use crate::app::App;
use crate::error::ApiError;

/// A question, and documents to sort by it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct RerankRequest {
    /// The model's name.
    model: Option<String>,
}

/// Not supported: no model that can be served here is trained to sort documents.
#[utoipa::path(post, path = "/rerank", request_body = RerankRequest, responses(
    (status = 400, description = "the request cannot be served as it is", body = Object),
    (status = 501, description = "no model can do it", body = Object)))]
pub(crate) async fn rerank(
    State(app): State<App>,
    Work(request, _): Work<RerankRequest>,
) -> Result<(), ApiError> {
    let model = app.models.look(request.model.as_deref()).await?;
    Err(ApiError::new(
        StatusCode::NOT_IMPLEMENTED,
        "not_supported_error",
        format!(
            "the model {} is not made to rank documents; compare vectors of /v1/embeddings instead",
            model.name
        ),
    )
    .with_code("unsupported_route"))
}
