//! The middleware around each handler. It checks origin, key and body, assigns an id to the
//! request, and converts errors to the format of the API.

use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::auth::host_of;
use crate::error::{ApiError, Family};
use crate::metrics::Answer;
use crate::pipeline::body_too_large;
use crate::state::App;
use crate::telemetry::RequestSpan;

pub(crate) fn cors(origins: &[String]) -> CorsLayer {
    let allowed = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        let values = origins.iter().filter_map(|o| HeaderValue::from_str(o).ok());
        AllowOrigin::list(values)
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .max_age(Duration::from_secs(600))
}

pub(crate) async fn unknown(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(100).collect();
    ApiError::new(
        StatusCode::NOT_FOUND,
        "invalid_request_error",
        format!("there is no route {path:?}; /openapi.json lists the routes"),
    )
    .with_code("not_found")
}

pub(crate) async fn wrong_method(request: Request) -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        format!(
            "the method {} is not supported for this path",
            request.method()
        ),
    )
    .with_code("method_not_allowed")
}

/// Refuses a body before reading it, if it is compressed or if its announced size is too large.
pub(crate) async fn refuse_bodies(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let headers = request.headers();
    let length = headers.get(header::CONTENT_LENGTH);
    let length: Option<u64> = length.and_then(|v| v.to_str().ok()?.parse().ok());
    if length.is_some_and(|n| n > app.limits.body_bytes as u64) {
        return body_too_large(app.limits.body_bytes).into_response();
    }
    let plain = |v: &HeaderValue| v.as_bytes().eq_ignore_ascii_case(b"identity");
    if !headers.get_all(header::CONTENT_ENCODING).iter().all(plain) {
        return ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "compressed bodies are not accepted",
        )
        .into_response();
    }
    next.run(request).await
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Assigns an id to the request, counts its answer, and converts errors to the format of the path's
/// API.
pub(crate) async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or_else(|| String::from("none"), |path| path.as_str().to_owned());
    let family = Family::for_path(request.uri().path());
    let client_id = request.headers().get(REQUEST_ID).cloned();
    let client_id = client_id.filter(|id| id.len() <= 128 && id.to_str().is_ok());
    let id = client_id.unwrap_or_else(|| {
        let name = app.name("req-");
        HeaderValue::from_str(&name).unwrap_or(HeaderValue::from_static("req"))
    });
    let span = RequestSpan::begin(request.method(), &route, request.headers());
    let mut response = span.within(next.run(request)).await;
    if family != Family::OpenAi
        && let Some(error) = response.extensions_mut().remove::<ApiError>()
    {
        response = error.response(family);
    }
    if app.engine.is_draining() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    let headers = response.headers_mut();
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(REQUEST_ID, id.clone());
    let status = response.status().as_u16();
    span.answered(status);
    tracing::info!(request = ?id, route, status, "answered");
    let answer = Answer { route, status };
    app.metrics.answers.get_or_create(&answer).inc();
    response
}

/// Refuses requests that a browser sends for web pages of other origins.
pub(crate) async fn check_source(State(app): State<App>, request: Request, next: Next) -> Response {
    let access = &app.access;
    let host = host_of(request.uri(), request.headers());
    let forbidden = |message: &str| {
        ApiError::new(StatusCode::FORBIDDEN, "permission_error", message).into_response()
    };
    if !access.allows_host(host) {
        return forbidden(
            "the header Host names another machine; this server accepts requests for this machine only",
        );
    }
    if let Some(origin) = request.headers().get(header::ORIGIN) {
        let allowed = origin
            .to_str()
            .is_ok_and(|origin| access.allows_origin(origin, host));
        if !allowed {
            return forbidden(
                "web pages of this origin are not allowed; add it with the server's --allow-origin",
            );
        }
    }
    next.run(request).await
}

/// Refuses requests without the key.
pub(crate) async fn check_key(State(app): State<App>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    if app.access.allows_key(bearer.or_else(|| text("x-api-key"))) {
        return next.run(request).await;
    }
    // Answers to wrong keys wait one after another, whichever client sends them. This limits how
    // many keys can be tried per second. Requests with the right key do not wait.
    if bearer.is_some() || text("x-api-key").is_some() {
        app.access.pause().await;
    }
    // A missing key and a wrong key get the same answer.
    ApiError::new(
        StatusCode::UNAUTHORIZED,
        "authentication_error",
        "the API key is missing or wrong; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
    )
    .with_code("invalid_api_key")
    .into_response()
}
