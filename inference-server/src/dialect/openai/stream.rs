//! Merges several replies into one stream of server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;
use futures_util::stream::{self, StreamExt};
use serde_json::Value;

use crate::error::{ApiError, Family};
use crate::pipeline::events::{merged, sse};
use crate::pipeline::run::{Item, Reply};

/// Converts items of replies to chunks of a stream.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks of one item.
    fn of(&mut self, reply: usize, item: Item) -> Result<Vec<Value>, ApiError>;

    /// The chunks after the last item.
    fn last(&mut self) -> Vec<Value>;
}

/// Answers with chunks as events and a final `[DONE]`. After an error, only `[DONE]` follows, and
/// replies that still run are cancelled.
pub(crate) fn answer(replies: Vec<Reply>, chunks: impl Chunks, ping: Duration) -> Response {
    let state = Some((Box::pin(merged(replies)), chunks));
    let events = stream::unfold(state, |state| async {
        let (mut items, mut chunks) = state?;
        let event = |value: Value| Ok::<_, Infallible>(Event::default().data(value.to_string()));
        let done = || Ok(Event::default().data("[DONE]"));
        loop {
            match items.next().await {
                Some((reply, item)) => match chunks.of(reply, item) {
                    Ok(values) if values.is_empty() => {}
                    Ok(values) => {
                        let events: Vec<_> = values.into_iter().map(event).collect();
                        return Some((events, Some((items, chunks))));
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
