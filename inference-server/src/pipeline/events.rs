//! Streams of replies as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};

use super::run::{Item, Reply};

/// The items of several replies in order of arrival, each with the index of its reply.
pub(crate) fn merged(replies: Vec<Reply>) -> impl Stream<Item = (usize, Item)> + Send {
    let of_one = |(i, reply): (usize, Reply)| {
        Box::pin(stream::unfold(reply, move |mut reply| async move {
            let item = reply.next().await?;
            Some(((i, item), reply))
        }))
    };
    stream::select_all(replies.into_iter().enumerate().map(of_one))
}

/// Server-sent events, with headers that prevent buffering in proxies.
pub(crate) fn sse(
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
    ping: Duration,
) -> Response {
    let alive = KeepAlive::new().interval(ping).text("ping");
    let mut response = Sse::new(events).keep_alive(alive).into_response();
    let headers = response.headers_mut();
    let no = HeaderValue::from_static("no");
    headers.insert(HeaderName::from_static("x-accel-buffering"), no);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
