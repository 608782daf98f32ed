//! `/v1/chat/completions`.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use inference::{ChatEnd, ChatPrompt, FinishReason, Grammar, Token};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::options::{self, Usage};
use super::stream::{self, Chunks};
use super::types::{ChatRequest, ResponseFormat};
use crate::error::ApiError;
use crate::models::ServedModel;
use crate::pipeline::ask::Ask;
use crate::pipeline::choice::ToolChoice;
use crate::pipeline::prepare::with_logprobs;
use crate::pipeline::run::{self, Call, End, Item, Keep};
use crate::pipeline::{Work, prepare};
use crate::reply::Delta;
use crate::state::App;

/// The `system_fingerprint`. A seed reproduces a reply only with the same model and the same
/// version of this server.
pub(crate) const FINGERPRINT: &str = concat!("inference-server-", env!("CARGO_PKG_VERSION"));

pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| d.as_secs())
}

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", request_body = ChatRequest, responses(
    (status = 200, description = "a chat completion, or with `stream` its chunks as server-sent events", content((Object = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<ChatRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = &app.models.get(request.model.as_deref(), None).await?;
    refuse(&request)?;
    let fields = request.sampling();
    let n = options::choices(&app, &fields)?;
    let usage = options::wants_usage(&fields)?;
    let mut options = options::options(&app, model, &fields)?;
    options.output.logprobs = logprobs(&app, model, &request)?;
    options.constraints.grammar = grammar(&app, model, &request)?;
    let asked = match request.max_completion_tokens {
        Some(n) => ("max_completion_tokens", Some(n)),
        None => ("max_tokens", request.max_tokens),
    };
    options::asked(asked.0, asked.1)?;
    let head = Head {
        id: app.name("chatcmpl-"),
        created: now(),
        model: model.id().to_owned(),
        logprobs: options.output.logprobs.is_some(),
    };
    let stream = request.stream.unwrap_or(false);
    let (prompt, choice) = prompt(request)?;
    let mut ask = Ask::new(&app, options, arrived)?;
    (ask.most, ask.choices, ask.streamed) = (asked, n, stream);
    let replies = ask
        .chat(&app, model, places, prompt, &choice)
        .await?
        .replies;
    if stream {
        let chunks = ChatChunks {
            head,
            usage: usage.then(Usage::default),
            choices: (0..n).map(|_| Choice::default()).collect(),
        };
        return Ok(stream::answer(replies, chunks, app.limits.ping));
    }
    let mut usage = Usage::default();
    let mut choices = Vec::with_capacity(n);
    let keep = || Logprobs::new(head.logprobs);
    for (i, reply) in run::all(replies, keep).await?.into_iter().enumerate() {
        usage.add(&reply.end.metrics, i == 0);
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let said = !reply.content.is_empty() || reply.calls.is_empty();
        let content = said.then_some(reply.content);
        message.insert("content".into(), content.into());
        message.insert("refusal".into(), Value::Null);
        if !reply.reasoning.is_empty() {
            message.insert("reasoning_content".into(), reply.reasoning.into());
        }
        if !reply.calls.is_empty() {
            message.insert("tool_calls".into(), reply.calls.iter().map(call).collect());
        }
        choices.push(WholeChoice {
            index: i,
            message,
            finish_reason: finish(&reply.end, !reply.calls.is_empty()),
            logprobs: head.logprobs.then_some(reply.collected),
        });
    }
    let body = Completion {
        id: head.id,
        object: "chat.completion",
        created: head.created,
        model: head.model,
        system_fingerprint: FINGERPRINT,
        choices,
        usage: usage.json(),
    };
    Ok(axum::Json(body).into_response())
}

/// An answer. It is a struct, because log-probabilities as JSON values would need many times the
/// memory.
#[derive(Serialize)]
pub(super) struct Completion<C> {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) system_fingerprint: &'static str,
    pub(super) choices: Vec<C>,
    pub(super) usage: Value,
}

#[derive(Serialize)]
struct WholeChoice {
    index: usize,
    message: Map<String, Value>,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

/// Log-probabilities of a reply's tokens.
#[derive(Debug, Serialize)]
struct Logprobs {
    #[serde(skip)]
    wanted: bool,
    content: Vec<Logprob>,
}

impl Logprobs {
    fn new(wanted: bool) -> Self {
        let content = Vec::new();
        Self { wanted, content }
    }
}

impl Keep for Logprobs {
    fn add(&mut self, token: Token) {
        if self.wanted {
            self.content.push(Logprob::from_token(token));
        }
    }
}

/// Counts the tokens of a conversation's prompt.
#[utoipa::path(post, path = "/v1/chat/completions/input_tokens", request_body = ChatRequest, responses(
    (status = 200, description = "`input_tokens`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn count_tokens(
    State(app): State<App>,
    Work(request, places): Work<ChatRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let (prompt, _) = prompt(request)?;
    let (_, prepared) = prepare::chat(&app, model, places, prompt).await?;
    let count = prepared.ids.len();
    Ok(axum::Json(
        json!({"object": "response.input_tokens", "input_tokens": count}),
    ))
}

/// Refuses unsupported fields by name.
fn refuse(request: &ChatRequest) -> Result<(), ApiError> {
    let not_null = |value: &Option<Value>| value.as_ref().is_some_and(|v| !v.is_null());
    for (param, there, instead) in [
        ("functions", not_null(&request.functions), "use tools"),
        (
            "function_call",
            not_null(&request.function_call),
            "use tool_choice",
        ),
        ("audio", not_null(&request.audio), "leave it out"),
        (
            "web_search_options",
            not_null(&request.web_search_options),
            "leave it out",
        ),
        (
            "modalities",
            request.modalities.iter().flatten().any(|m| m != "text"),
            "only text is generated",
        ),
    ] {
        if there {
            return Err(ApiError::unsupported(
                param,
                format!("{param} is not supported; {instead}"),
            ));
        }
    }
    Ok(())
}

fn prompt(request: ChatRequest) -> Result<(ChatPrompt, ToolChoice), ApiError> {
    let mut prompt = ChatPrompt::new(request.messages);
    prompt.tools = request.tools.unwrap_or_default();
    let mut choice = match &request.tool_choice {
        None | Some(Value::Null) => ToolChoice::default(),
        Some(choice) => match tool_choice(choice) {
            Some(Chosen::None) => {
                prompt.tools.clear();
                ToolChoice::none()
            }
            Some(Chosen::Some(choice)) => choice,
            None => {
                let shown: String = choice.to_string().chars().take(100).collect();
                return Err(ApiError::unsupported(
                    "tool_choice",
                    format!(
                        "tool_choice {shown} is not supported; use \"auto\", \"none\", \"required\" or \
                         {{\"type\": \"function\", \"function\": {{\"name\": ..}}}}"
                    ),
                ));
            }
        },
    };
    choice.one |= request.parallel_tool_calls == Some(false);
    prompt.template = request.chat_template_kwargs.unwrap_or_default();
    if let Some(effort) = request.reasoning_effort {
        prompt
            .template
            .insert("reasoning_effort".into(), effort.into());
    }
    let continues = request.continue_final_message.unwrap_or(false);
    prompt.end = match (continues, request.add_generation_prompt) {
        (true, Some(true)) => {
            return Err(ApiError::field(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            ));
        }
        (true, _) => ChatEnd::LastMessage,
        (false, Some(false)) => ChatEnd::Messages,
        (false, _) => ChatEnd::Reply,
    };
    Ok((prompt, choice))
}

/// A parsed `tool_choice`.
enum Chosen {
    /// The model must not call a tool.
    None,
    Some(ToolChoice),
}

/// Parses a `tool_choice`; `None` if its value is unknown.
fn tool_choice(choice: &Value) -> Option<Chosen> {
    match choice.as_str() {
        Some("auto") => return Some(Chosen::Some(ToolChoice::default())),
        Some("none") => return Some(Chosen::None),
        Some("required") => {
            return Some(Chosen::Some(ToolChoice {
                required: true,
                ..ToolChoice::default()
            }));
        }
        _ => {}
    }
    if choice.get("type")? != "function" {
        return None;
    }
    let name = choice.get("function")?.get("name")?.as_str()?;
    Some(Chosen::Some(ToolChoice::tool(name.to_owned())))
}

fn logprobs(
    app: &App,
    model: &ServedModel,
    request: &ChatRequest,
) -> Result<Option<usize>, ApiError> {
    let asked = request.logprobs.unwrap_or(false);
    match request.top_logprobs {
        Some(n) if n > app.limits.top_logprobs => Err(ApiError::field(
            "top_logprobs",
            format!(
                "top_logprobs is {n}; at most {} are allowed",
                app.limits.top_logprobs
            ),
        )),
        Some(n) if n > 0 && !asked => Err(ApiError::field(
            "top_logprobs",
            "top_logprobs needs logprobs to be true",
        )),
        top => with_logprobs(model, asked.then_some(top.unwrap_or(0))),
    }
}

fn grammar(
    app: &App,
    model: &ServedModel,
    request: &ChatRequest,
) -> Result<Option<Grammar>, ApiError> {
    let param = "response_format";
    if let Some(schema) = request.json_schema.as_ref().filter(|s| !s.is_null()) {
        if request.response_format.is_some() {
            let message = "json_schema and response_format exclude each other";
            return Err(ApiError::field("json_schema", message));
        }
        return prepare::grammar(app, model, "json_schema", schema).map(Some);
    }
    match &request.response_format {
        None | Some(ResponseFormat::Text) => Ok(None),
        Some(ResponseFormat::JsonObject { schema }) => {
            let object = json!({"type": "object"});
            let schema = schema.as_ref().filter(|s| !s.is_null()).unwrap_or(&object);
            prepare::grammar(app, model, param, schema).map(Some)
        }
        Some(ResponseFormat::JsonSchema { json_schema }) => {
            let Some(schema) = &json_schema.schema else {
                return Err(ApiError::field(
                    "response_format.json_schema.schema",
                    "the schema is missing",
                ));
            };
            prepare::grammar(app, model, "response_format.json_schema.schema", schema).map(Some)
        }
    }
}

/// OpenAI's `finish_reason`.
pub(crate) fn finish(end: &End, called: bool) -> &'static str {
    match end.reason {
        FinishReason::Length => "length",
        _ if called => "tool_calls",
        _ => "stop",
    }
}

fn call(call: &Call) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// A token and its alternatives.
#[derive(Debug, Serialize)]
struct Logprob {
    token: String,
    logprob: f32,
    bytes: Option<Box<[u8]>>,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct Alternative {
    token: String,
    logprob: f32,
    bytes: Option<Box<[u8]>>,
}

impl Logprob {
    fn from_token(token: Token) -> Self {
        let (logprob, top) = token
            .logprobs
            .map_or((0.0, Vec::new()), |l| (l.logprob, l.top));
        let alternative = |t: inference::TopLogprob| Alternative {
            token: t.text,
            logprob: t.logprob,
            bytes: t.bytes,
        };
        Self {
            token: match &token.bytes {
                Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                None => token.text,
            },
            logprob,
            bytes: token.bytes,
            top_logprobs: top.into_iter().map(alternative).collect(),
        }
    }
}

/// The fields that all chunks of a stream share.
struct Head {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
}

#[derive(Default)]
struct Choice {
    begun: bool,
    called: bool,
    /// Log-probabilities of tokens whose text was not sent yet.
    waiting: Vec<Logprob>,
}

struct ChatChunks {
    head: Head,
    /// The counts of tokens, if the request asks for them.
    usage: Option<Usage>,
    choices: Vec<Choice>,
}

impl ChatChunks {
    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = json!({
            "id": self.head.id,
            "object": "chat.completion.chunk",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        });
        if self.usage.is_some() {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn choice(&self, i: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        self.chunk(json!([{
            "index": i,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }]))
    }

    /// The first chunk of a reply, which names the role.
    fn begin(&mut self, i: usize, chunks: &mut Vec<Value>) {
        if !std::mem::replace(&mut self.choices[i].begun, true) {
            let delta = json!({"role": "assistant", "content": ""});
            chunks.push(self.choice(i, delta, Value::Null, None));
        }
    }

    fn deltas(&mut self, i: usize, deltas: Vec<Delta>, chunks: &mut Vec<Value>) {
        for delta in deltas {
            let delta = match delta {
                Delta::Content(text) => json!({"content": text}),
                Delta::Reasoning(text) => json!({"reasoning_content": text}),
                Delta::ToolCall { index, id, name } => json!({"tool_calls": [{
                    "index": index,
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }]}),
                Delta::Arguments { index, json } => json!({"tool_calls": [{
                    "index": index,
                    "function": {"arguments": json},
                }]}),
                Delta::CallEnded { .. } => {
                    self.choices[i].called = true;
                    continue;
                }
                // The arguments remain incomplete JSON, which shows clients that the call is
                // broken.
                Delta::CallBroken { .. } => continue,
            };
            let logprobs = self.waiting(i);
            chunks.push(self.choice(i, delta, logprobs, None));
        }
    }

    /// Returns the log-probabilities that no chunk has contained yet.
    fn waiting(&mut self, i: usize) -> Value {
        let waiting = std::mem::take(&mut self.choices[i].waiting);
        match waiting.is_empty() {
            true => Value::Null,
            false => json!({"content": waiting}),
        }
    }
}

impl Chunks for ChatChunks {
    fn of(&mut self, i: usize, item: Item) -> Result<Vec<Value>, ApiError> {
        let mut chunks = Vec::new();
        match item {
            Item::Started => self.begin(i, &mut chunks),
            Item::Token { token, deltas } => {
                self.begin(i, &mut chunks);
                if self.head.logprobs {
                    self.choices[i].waiting.push(Logprob::from_token(*token));
                }
                self.deltas(i, deltas, &mut chunks);
            }
            Item::End { deltas, end } => {
                self.begin(i, &mut chunks);
                self.deltas(i, deltas, &mut chunks);
                let finish = finish(&end, self.choices[i].called);
                let logprobs = self.waiting(i);
                chunks.push(self.choice(i, json!({}), logprobs, Some(finish)));
                if let Some(usage) = &mut self.usage {
                    usage.add(&end.metrics, i == 0);
                }
            }
            Item::Failed(error) => return Err(error),
        }
        Ok(chunks)
    }

    fn last(&mut self) -> Vec<Value> {
        let Some(usage) = &self.usage else {
            return Vec::new();
        };
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage.json();
        vec![chunk]
    }
}
