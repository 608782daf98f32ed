//! Several replies as one stream of server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde_json::Value;

use crate::api::run::{Item, Reply};
use crate::error::{ApiError, Family};

/// The news of several replies, in the order in which they come, each with its reply's number.
pub(crate) fn merged(replies: Vec<Reply>) -> impl Stream<Item = (usize, Item)> + Send {
    let of_one = |(i, reply): (usize, Reply)| {
        Box::pin(stream::unfold(reply, move |mut reply| async move {
            let item = reply.next().await?;
            Some(((i, item), reply))
        }))
    };
    stream::select_all(replies.into_iter().enumerate().map(of_one))
}

/// What turns news into chunks.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks of one piece of news.
    fn of(&mut self, reply: usize, item: Item) -> Result<Vec<Value>, ApiError>;

    /// The chunks after the last news.
    fn last(&mut self) -> Vec<Value>;
}

/// Answers with chunks as events, `[DONE]` last. After an error nothing but `[DONE]` comes: replies
/// that still run are dropped, which cancels them.
pub(crate) fn answer(replies: Vec<Reply>, chunks: impl Chunks, ping: Duration) -> Response {
    let state = Some((Box::pin(merged(replies)), chunks));
    let events = stream::unfold(state, |state| async {
        let (mut news, mut chunks) = state?;
        let event = |value: Value| Ok::<_, Infallible>(Event::default().data(value.to_string()));
        let done = || Ok(Event::default().data("[DONE]"));
        loop {
            match news.next().await {
                Some((reply, item)) => match chunks.of(reply, item) {
                    Ok(values) if values.is_empty() => {}
                    Ok(values) => {
                        let events: Vec<_> = values.into_iter().map(event).collect();
                        return Some((events, Some((news, chunks))));
                    }
                    Err(error) => {
                        let events = vec![event(error.body(Family::OpenAi)), done()];
                        return Some((events, None));
                    }
                },
                None => {
                    let mut events: Vec<_> = chunks.last().into_iter().map(event).collect();
                    events.push(done());
                    return Some((events, None));
                }
            }
        }
    });
    sse(events.flat_map(stream::iter), ping)
}

/// Events with what keeps proxies from holding them back.
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
