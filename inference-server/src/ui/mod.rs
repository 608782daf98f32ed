//! The chat page at `/` for browsers. Its files are part of the program, and the page loads nothing
//! from other servers.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// The content security policy: the page loads files of this server only, has no inline code, and
/// must not appear in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        // The page's files must all be of one version, so browsers must not cache them.
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-frame-options"), "DENY"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether the client is a browser that navigates to the page.
pub(crate) fn is_wanted(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/html"))
}

pub(crate) fn page() -> Response {
    let mut response = file("text/html; charset=utf-8", include_str!("index.html"));
    let vary = HeaderValue::from_static("accept");
    response.headers_mut().insert(header::VARY, vary);
    response
}

pub(crate) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("app.js"))
}

pub(crate) async fn markdown() -> Response {
    file(
        "text/javascript; charset=utf-8",
        include_str!("markdown.js"),
    )
}

pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("style.css"))
}
