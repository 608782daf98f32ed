//! `/api/chat` and `/api/generate`. An answer is a stream of JSON lines, or a single JSON object.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use inference::{ChatPrompt, FinishReason, Message, Prompt};
use serde_json::{Map, Value, json};

use super::time;
use super::types::{self, ChatRequest, GenerateRequest, Rest};
use crate::engine::Places;
use crate::error::{ApiError, Family};
use crate::models::{KeepAlive, Lease};
use crate::pipeline::ask::Ask;
use crate::pipeline::choice::ToolChoice;
use crate::pipeline::run::{self, Call, Calls, End, Item};
use crate::pipeline::{Maybe, prepare};
use crate::reply::Delta;
use crate::state::App;

/// The API that defines the format of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Chat,
    Generate,
}

/// The prompt to run.
enum Work {
    Chat(Box<ChatPrompt>),
    Raw(String),
}

/// Answers a conversation.
#[utoipa::path(post, path = "/api/chat", request_body = ChatRequest, responses(
    (status = 200, description = "lines of JSON, or with `stream` false one", content((Object = "application/json"), (String = "application/x-ndjson"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn chat(
    State(app): State<App>,
    asked: Maybe<ChatRequest>,
) -> Result<Response, ApiError> {
    let request = asked.request;
    let keep = request.rest.check()?;
    let name = request.model.as_deref();
    if request.messages.is_empty() {
        return load(&app, name, keep, Shape::Chat).await;
    }
    let places = prepare::place(&app, asked.places)?;
    let model = &app.models.get(name, keep).await?;
    let mut prompt = ChatPrompt::new(types::messages(request.messages)?);
    prompt.tools = request.tools.unwrap_or_default();
    prompt.template = request.rest.template(model)?;
    let work = Work::Chat(Box::new(prompt));
    answer(&app, model, places, work, &request.rest, Shape::Chat).await
}

/// Answers a text. With `raw`, continues it.
#[utoipa::path(post, path = "/api/generate", request_body = GenerateRequest, responses(
    (status = 200, description = "lines of JSON, or with `stream` false one", content((Object = "application/json"), (String = "application/x-ndjson"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn generate(
    State(app): State<App>,
    asked: Maybe<GenerateRequest>,
) -> Result<Response, ApiError> {
    let request = asked.request;
    let keep = request.rest.check()?;
    let text = |text: &Option<String>| text.as_ref().is_some_and(|t| !t.is_empty());
    let some = |value: &Option<Value>| match value {
        None | Some(Value::Null) => false,
        Some(Value::Array(many)) => !many.is_empty(),
        Some(_) => true,
    };
    for (param, there) in [
        ("template", text(&request.template)),
        ("suffix", text(&request.suffix)),
        ("context", some(&request.context)),
        ("images", some(&request.images)),
    ] {
        if there {
            let message = format!("{param} is not supported; leave it out");
            return Err(ApiError::unsupported(param, message));
        }
    }
    let name = request.model.as_deref();
    if request.prompt.is_empty() {
        return load(&app, name, keep, Shape::Generate).await;
    }
    let places = prepare::place(&app, asked.places)?;
    let model = &app.models.get(name, keep).await?;
    let work = if request.raw == Some(true) || !model.info().has_chat_template {
        Work::Raw(request.prompt)
    } else {
        let system = request.system.filter(|s| !s.is_empty());
        let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
        messages.push(Message::user(request.prompt));
        let mut prompt = ChatPrompt::new(messages);
        prompt.template = request.rest.template(model)?;
        Work::Chat(Box::new(prompt))
    };
    answer(&app, model, places, work, &request.rest, Shape::Generate).await
}

/// Answers a request without a prompt. It loads the model, or unloads it if `keep_alive` is zero.
async fn load(
    app: &App,
    name: Option<&str>,
    keep: Option<KeepAlive>,
    shape: Shape,
) -> Result<Response, ApiError> {
    let unload = keep == Some(Some(Duration::ZERO));
    let (id, reason) = if unload {
        let listed = app.models.look(name).await?;
        let gone = app.models.dismiss(&listed.name) || listed.loaded.is_none();
        // Clients cannot unload a model that was loaded at startup.
        (listed.name, if gone { "unload" } else { "load" })
    } else {
        let model = app.models.get(name, keep).await?;
        (model.id().to_owned(), "load")
    };
    let mut line = line(&id, shape, "", "", &[]);
    line.insert("done".into(), true.into());
    line.insert("done_reason".into(), reason.into());
    Ok(axum::Json(line).into_response())
}

async fn answer(
    app: &App,
    model: &Lease,
    places: Places,
    work: Work,
    rest: &Rest,
    shape: Shape,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let mut options = rest.options(app)?;
    options.constraints.grammar = rest.grammar(app, model)?;
    let mut ask = Ask::new(app, options, arrived)?;
    let context = rest.options.as_ref().and_then(|o| o.num_ctx);
    ask.most = ("options.num_predict", rest.asked());
    ask.context = ("options.num_ctx", context);
    ask.streamed = rest.stream != Some(false);
    let asked = match work {
        Work::Chat(prompt) => {
            let choice = ToolChoice::default();
            ask.chat(app, model, places, *prompt, &choice).await?
        }
        Work::Raw(text) => {
            let prompts = vec![Prompt::from(text)];
            ask.texts(app, model, places, "prompt", prompts).await?
        }
    };
    let reply = asked.one()?;
    if rest.stream == Some(false) {
        let complete = run::collect(reply, ()).await?;
        let mut line = line(
            model.id(),
            shape,
            &complete.content,
            &complete.reasoning,
            &complete.calls,
        );
        finish(&mut line, &complete.end, arrived.elapsed());
        return Ok(axum::Json(line).into_response());
    }
    let lines = Lines {
        model: model.id().to_owned(),
        shape,
        arrived,
        calls: Calls::default(),
    };
    let body = stream::unfold(Some((reply, lines)), |state| async {
        let (mut reply, mut lines) = state?;
        let item = reply.next().await?;
        let (text, more) = lines.of(item);
        let text = Ok::<_, Infallible>(Bytes::from(text));
        Some((text, more.then_some((reply, lines))))
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(body)).into_response())
}

/// The fields that all lines have.
fn line(
    model: &str,
    shape: Shape,
    content: &str,
    thinking: &str,
    calls: &[Call],
) -> Map<String, Value> {
    let mut line = Map::new();
    line.insert("model".into(), model.into());
    line.insert("created_at".into(), time::now().into());
    match shape {
        Shape::Generate => {
            line.insert("response".into(), content.into());
            if !thinking.is_empty() {
                line.insert("thinking".into(), thinking.into());
            }
        }
        Shape::Chat => {
            let mut message = Map::new();
            message.insert("role".into(), "assistant".into());
            message.insert("content".into(), content.into());
            if !thinking.is_empty() {
                message.insert("thinking".into(), thinking.into());
            }
            if !calls.is_empty() {
                let call = |call: &Call| {
                    let arguments: Value =
                        serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
                    json!({"function": {"name": call.name, "arguments": arguments}})
                };
                message.insert("tool_calls".into(), calls.iter().map(call).collect());
            }
            line.insert("message".into(), message.into());
        }
    }
    line.insert("done".into(), false.into());
    line
}

/// Adds the fields of the last line. Times are in nanoseconds.
fn finish(line: &mut Map<String, Value>, end: &End, total: Duration) {
    let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    let reason = match end.reason {
        FinishReason::Length => "length",
        _ => "stop",
    };
    let m = &end.metrics;
    for (name, value) in [
        ("done", Value::from(true)),
        ("done_reason", reason.into()),
        ("total_duration", nanos(total).into()),
        ("load_duration", nanos(end.queued).into()),
        ("prompt_eval_count", m.prompt_tokens.into()),
        ("prompt_eval_duration", nanos(m.prefill_time).into()),
        ("eval_count", m.generated_tokens.into()),
        ("eval_duration", nanos(m.decode_time).into()),
    ] {
        line.insert(name.into(), value);
    }
}

struct Lines {
    model: String,
    shape: Shape,
    arrived: Instant,
    /// Complete and incomplete calls that were not sent yet. A line may contain only complete
    /// calls.
    calls: Calls,
}

impl Lines {
    /// Returns the lines of one item, and whether more items follow.
    fn of(&mut self, item: Item) -> (String, bool) {
        let (deltas, end) = match item {
            Item::Started => return (String::new(), true),
            Item::Token { deltas, .. } => (deltas, None),
            Item::End { deltas, end } => (deltas, Some(end)),
            Item::Failed(error) => {
                return (format!("{}\n", error.body(Family::Ollama)), false);
            }
        };
        let (mut content, mut thinking) = (String::new(), String::new());
        for delta in deltas {
            match delta {
                Delta::Content(text) => content.push_str(&text),
                Delta::Reasoning(text) => thinking.push_str(&text),
                Delta::ToolCall { id, name, .. } => self.calls.begin(id, name),
                Delta::Arguments { json, .. } => self.calls.arguments(&json),
                Delta::CallEnded { .. } => self.calls.end(),
                Delta::CallBroken { .. } => self.calls.give_up(),
            }
        }
        let calls = std::mem::take(&mut self.calls.done);
        let Some(end) = end else {
            if content.is_empty() && thinking.is_empty() && calls.is_empty() {
                return (String::new(), true);
            }
            let line = line(&self.model, self.shape, &content, &thinking, &calls);
            return (format!("{}\n", Value::Object(line)), true);
        };
        let mut text = String::new();
        if !calls.is_empty() {
            let line = line(&self.model, self.shape, "", "", &calls);
            text = format!("{}\n", Value::Object(line));
        }
        let mut last = line(&self.model, self.shape, &content, &thinking, &[]);
        finish(&mut last, &end, self.arrived.elapsed());
        text.push_str(&format!("{}\n", Value::Object(last)));
        (text, false)
    }
}
