//! Runs a request in the engine, and returns items for its API: text, reasoning, calls, and one
//! end. Streamed and unstreamed replies use the same code.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use inference::{GenerateOptions, Token};

pub(crate) use super::items::{Call, Calls, End, Item};
use super::prepare::Prepared;
use super::rounds::{Rounds, Step};
use crate::engine::{Event, Job, Places, Running};
use crate::error::ApiError;
use crate::models::Lease;
use crate::reply::{Delta, Either, PlainText, ReplyParser};
use crate::state::App;
use crate::telemetry::ReplySpans;

pub(crate) struct Reply {
    running: Running,
    parser: Box<dyn ReplyParser>,
    queued: Duration,
    over: bool,
    /// The rounds of a reply that may call the server's tools.
    rounds: Option<Box<Rounds>>,
    /// The place in the queue. It is held while tools run.
    place: Arc<Places>,
    /// Items that were read early. `next` returns them first.
    ahead: VecDeque<Item>,
    spans: ReplySpans,
}

impl Reply {
    /// Queues a request.
    pub(crate) fn start(
        app: &App,
        model: &Lease,
        place: Places,
        prepared: &Prepared,
        options: GenerateOptions,
        arrived: Instant,
    ) -> Self {
        let place = Arc::new(place);
        let spans = ReplySpans::begin(model.id(), arrived);
        let (running, parser) = run(app, model, &place, prepared, options, arrived);
        Self {
            running,
            parser,
            queued: Duration::ZERO,
            over: false,
            rounds: None,
            place,
            ahead: VecDeque::new(),
            spans,
        }
    }

    /// Lets the reply call the server's tools.
    pub(crate) fn with_rounds(mut self, rounds: Option<Rounds>) -> Self {
        self.rounds = rounds.map(Box::new);
        self
    }
    /// The next item; `None` after the end.
    pub(crate) async fn next(&mut self) -> Option<Item> {
        if let Some(item) = self.ahead.pop_front() {
            return Some(item);
        }
        if self.over {
            return None;
        }
        let item = loop {
            let item = self.read().await;
            let Some(rounds) = &mut self.rounds else {
                break item;
            };
            match rounds.read(item) {
                Step::Pass(item) => break item,
                Step::Skip => {}
                Step::Again => match rounds.again(&self.place).await {
                    Ok((prepared, options)) => {
                        let (app, model) = (rounds.app(), rounds.model());
                        let arrived = rounds.arrived();
                        (self.running, self.parser) =
                            run(app, model, &self.place, &prepared, options, arrived);
                        self.spans = self.spans.again();
                    }
                    Err(error) => break Item::Failed(error),
                },
            }
        };
        self.over = matches!(item, Item::End { .. } | Item::Failed(_));
        Some(item)
    }

    /// The next item of the running request.
    async fn read(&mut self) -> Item {
        match self.running.next().await {
            Some(Event::Started { queued }) => {
                self.queued = queued;
                self.spans.started();
                Item::Started
            }
            Some(Event::Token(token)) => {
                let deltas = self.parser.feed(&token);
                self.spans.token();
                Item::Token { token, deltas }
            }
            Some(Event::Done {
                reason,
                stop,
                metrics,
            }) => {
                let deltas = self.parser.finish(stop.as_ref());
                self.spans.ended(reason, &metrics);
                let end = End {
                    reason,
                    stop,
                    metrics: *metrics,
                    queued: self.queued,
                };
                Item::End { deltas, end }
            }
            Some(Event::Failed(error)) => {
                self.spans.failed(error.kind().as_str());
                Item::Failed(ApiError::of_engine(&error))
            }
            None => Item::Failed(ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "server_error",
                "the reply was given up: its reader was too far behind, or the engine is gone",
            )),
        }
    }
}

/// Queues a request, and makes the parser of its reply.
fn run(
    app: &App,
    model: &Lease,
    place: &Arc<Places>,
    prepared: &Prepared,
    options: GenerateOptions,
    arrived: Instant,
) -> (Running, Box<dyn ReplyParser>) {
    let options = options.with_adapter(model.adapter().map(str::to_owned));
    let format = match prepared.verbatim {
        true => &PlainText,
        false => model.format(),
    };
    let parser = format.parser(&prepared.request);
    let parser = match &prepared.either {
        Some(either) => Box::new(Either::new(either, parser)),
        None => parser,
    };
    let most = prepared.ids.len().saturating_add(options.max_tokens);
    let running = app.engine.submit(Job {
        kv_bytes: model.kv_bytes().saturating_mul(most as u64),
        model: model.clone(),
        prompt: prepared.ids.clone(),
        options,
        arrived,
        place: Arc::clone(place),
    });
    (running, parser)
}

/// Waits for the first event of each reply, at most `wait` in total. So a request that fails
/// immediately gets an HTTP error status instead of an event in a stream.
///
/// # Errors
/// The error of a request that failed.
pub(crate) async fn first_signs(replies: &mut [Reply], wait: Duration) -> Result<(), ApiError> {
    let until = tokio::time::Instant::now() + wait;
    for reply in replies {
        match tokio::time::timeout_at(until, reply.next()).await {
            // The request is still in the queue. The client gets its response header now.
            Err(_) | Ok(None) => {}
            Ok(Some(Item::Failed(error))) => return Err(error),
            Ok(Some(item)) => reply.ahead.push_back(item),
        }
    }
    Ok(())
}

/// The data of each token that a reply without streaming keeps, besides the text.
pub(crate) trait Keep: Send {
    fn add(&mut self, token: Token);
}

/// Keeps no data of tokens.
impl Keep for () {
    fn add(&mut self, _: Token) {}
}

/// Keeps all tokens. Use it only for short replies.
impl Keep for Vec<Token> {
    fn add(&mut self, mut token: Token) {
        // Logits are as large as the vocabulary, so they are dropped.
        token.logits = None;
        self.push(token);
    }
}

/// A complete, unstreamed reply.
#[derive(Debug)]
pub(crate) struct Collected<K> {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) collected: K,
    pub(crate) end: End,
}

/// Reads a reply to its end.
///
/// # Errors
/// The failure of the reply.
pub(crate) async fn collect<K: Keep>(
    mut reply: Reply,
    mut collected: K,
) -> Result<Collected<K>, ApiError> {
    let (mut content, mut reasoning) = (String::new(), String::new());
    let mut calls = Calls::default();
    let mut put = |deltas: Vec<Delta>| {
        for delta in deltas {
            match delta {
                Delta::Content(text) => content.push_str(&text),
                Delta::Reasoning(text) => reasoning.push_str(&text),
                Delta::ToolCall { id, name, .. } => calls.begin(id, name),
                Delta::Arguments { json, .. } => calls.arguments(&json),
                Delta::CallEnded { .. } => calls.end(),
                Delta::CallBroken { .. } => calls.give_up(),
            }
        }
    };
    let mut ended = None;
    while let Some(item) = reply.next().await {
        match item {
            Item::Started => {}
            Item::Token { token, deltas } => {
                collected.add(*token);
                put(deltas);
            }
            Item::End { deltas, end } => {
                put(deltas);
                ended = Some(end);
            }
            Item::Failed(error) => return Err(error),
        }
    }
    let end = ended.ok_or_else(ApiError::internal)?;
    Ok(Collected {
        content,
        reasoning,
        calls: calls.done,
        collected,
        end,
    })
}

/// Reads several replies concurrently to their ends. The engine cancels a reply whose items are not
/// read.
///
/// # Errors
/// The first failure. The other replies are cancelled.
pub(crate) async fn all<K: Keep>(
    replies: Vec<Reply>,
    keep: impl Fn() -> K,
) -> Result<Vec<Collected<K>>, ApiError> {
    let replies = replies.into_iter().map(|reply| collect(reply, keep()));
    futures_util::future::try_join_all(replies).await
}
