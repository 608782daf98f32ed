//! The status of the server: health, metrics and features.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::engine::Health;
use crate::state::App;
use crate::ui;

/// The routes that need no API key.
pub(crate) fn public_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(root))
        .routes(routes!(health))
        .routes(routes!(ready))
        .route("/v1/health", axum::routing::get(health))
}

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(metrics))
        .routes(routes!(openapi))
}

/// Serves the chat page to browsers. Other clients get the text that Ollama's clients look for.
#[utoipa::path(get, path = "/", responses((status = 200, description = "the server answers", body = String)))]
pub(crate) async fn root(State(app): State<App>, headers: HeaderMap) -> Response {
    match app.ui && ui::is_wanted(&headers) {
        true => ui::page(),
        false => "Ollama is running".into_response(),
    }
}

/// Tells whether the engine makes progress.
#[utoipa::path(get, path = "/health", responses(
    (status = 200, description = "it does", body = Object),
    (status = 503, description = "it is stalled, failing or gone", body = Object)))]
pub(crate) async fn health(State(app): State<App>) -> Response {
    let (status, word) = match app.engine.health() {
        Health::Good => (StatusCode::OK, "ok"),
        Health::Stalled => (StatusCode::SERVICE_UNAVAILABLE, "stalled"),
        Health::Failing => (StatusCode::SERVICE_UNAVAILABLE, "failing"),
        Health::Dead => (StatusCode::SERVICE_UNAVAILABLE, "dead"),
    };
    (status, axum::Json(json!({"status": word}))).into_response()
}

/// Tells whether a new request would be accepted.
#[utoipa::path(get, path = "/ready", responses(
    (status = 200, description = "it would", body = Object),
    (status = 503, description = "the queue is full, or the server stops", body = Object)))]
pub(crate) async fn ready(State(app): State<App>) -> Response {
    let engine = &app.engine;
    let (in_flight, most) = (engine.in_flight(), engine.capacity());
    let ready = !engine.is_draining() && in_flight < most && engine.health() == Health::Good;
    let status = if ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let body = json!({"ready": ready, "requests": in_flight, "places": most});
    (status, axum::Json(body)).into_response()
}

/// Returns the metrics in Prometheus's text format.
#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "OpenMetrics text", body = String,
    content_type = "application/openmetrics-text")))]
pub(crate) async fn metrics(State(app): State<App>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text()).into_response()
}

/// Returns this description of the API.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200, description = "OpenAPI 3.1", body = Object)))]
pub(crate) async fn openapi(State(app): State<App>) -> Response {
    let kind = "application/json";
    ([(header::CONTENT_TYPE, kind)], app.description.clone()).into_response()
}
