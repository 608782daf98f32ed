//! Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

mod stream;
mod types;

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use inference::{
    ChatPrompt, FinishReason, GenerateMetrics, GenerateOptions, SamplingDefaults, StopCause,
};
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::models::ServedModel;
use crate::pipeline::ask::Ask;
use crate::pipeline::choice::ToolChoice;
use crate::pipeline::run::{self, End};
use crate::pipeline::{Work, parameters, prepare};
use crate::state::App;
use types::{Anthropic, CountRequest, MessagesRequest, Thinking};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(count_tokens))
}

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/messages", request_body = MessagesRequest, responses(
    (status = 200, description = "a message, or with `stream` its events", content((Object = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(request, places): Work<MessagesRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let options = options(&app, model, &request)?;
    let mut ask = Ask::new(&app, options, arrived)?;
    ask.most = ("max_tokens", Some(request.max_tokens));
    ask.reasoning = request.thinking.as_ref().and_then(Thinking::budget);
    ask.streamed = request.stream.unwrap_or(false);
    let streamed = ask.streamed;
    let (prompt, choice) = conversation(model, request.into())?;
    let asked = ask.chat(&app, model, places, prompt, &choice).await?;
    let tokens = asked.prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let reply = asked.one()?;
    let id = app.name("msg_");
    if streamed {
        let events = stream::Events::new(id, model.id(), tokens);
        return Ok(stream::answer(reply, events, app.limits.ping));
    }
    let complete = run::collect(reply, ()).await?;
    let mut content = Vec::new();
    if !complete.reasoning.is_empty() {
        content.push(json!({
            "type": "thinking",
            "thinking": complete.reasoning,
            "signature": stream::SIGNATURE,
        }));
    }
    if !complete.content.is_empty() {
        content.push(json!({"type": "text", "text": complete.content}));
    }
    for call in &complete.calls {
        let input: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        content.push(json!({
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": input,
        }));
    }
    let (reason, sequence) = stop_reason(&complete.end, !complete.calls.is_empty());
    let body = json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model.id(),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(&complete.end.metrics),
    });
    Ok(axum::Json(body).into_response())
}

/// Counts the tokens of a conversation.
#[utoipa::path(post, path = "/v1/messages/count_tokens", request_body = CountRequest, responses(
    (status = 200, description = "`input_tokens`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn count_tokens(
    State(app): State<App>,
    Work(request, places): Work<CountRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let (prompt, _) = conversation(model, request)?;
    let (_, prepared) = prepare::chat(&app, model, places, prompt).await?;
    Ok(axum::Json(json!({"input_tokens": prepared.ids.len()})))
}

fn options(
    app: &App,
    model: &ServedModel,
    request: &MessagesRequest,
) -> Result<GenerateOptions, ApiError> {
    if request.max_tokens == 0 {
        return Err(ApiError::field(
            "max_tokens",
            "max_tokens must be at least 1",
        ));
    }
    let budget = request.thinking.as_ref().and_then(|t| t.budget_tokens);
    if let Some(budget) = budget.filter(|n| *n == 0 || *n >= request.max_tokens) {
        return Err(ApiError::field(
            "thinking.budget_tokens",
            format!("budget_tokens is {budget}; it must be at least 1 and below max_tokens"),
        ));
    }
    let mut o = parameters::base::<Anthropic>(app, &SamplingDefaults::default())?;
    request.parameters.apply(&mut o)?;
    o.prefill.cache_salt = prepare::salt(request.cache_salt.as_ref())?;
    let stops = request.stop_sequences.clone().unwrap_or_default();
    o.stop.stop_strings = prepare::stops(app, "stop_sequences", stops)?;
    let config = request
        .output_config
        .as_ref()
        .and_then(|c| c.format.as_ref());
    if let Some(format) = config.or(request.output_format.as_ref()) {
        let param = "output_config.format";
        let (true, Some(schema)) = (format.kind == "json_schema", &format.schema) else {
            return Err(ApiError::unsupported(
                param,
                "only a format of type \"json_schema\" with a schema is supported",
            ));
        };
        o.constraints.grammar = Some(prepare::grammar(app, model, param, schema)?);
    }
    Ok(o)
}

fn conversation(
    model: &ServedModel,
    request: CountRequest,
) -> Result<(ChatPrompt, ToolChoice), ApiError> {
    let mut prompt = ChatPrompt::new(types::messages(request.system, request.messages)?);
    prompt.tools = types::tools(request.tools.unwrap_or_default())?;
    let mut choice = ToolChoice::default();
    if let Some(asked) = request.tool_choice {
        match (asked.kind.as_str(), asked.name) {
            ("auto", _) => {}
            ("none", _) => {
                prompt.tools.clear();
                choice = ToolChoice::none();
            }
            ("any", _) => choice.required = true,
            ("tool", Some(name)) => choice = ToolChoice::tool(name),
            (kind, _) => {
                let shown: String = kind.chars().take(40).collect();
                return Err(ApiError::unsupported(
                    "tool_choice",
                    format!(
                        "tool_choice {shown:?} is not supported; use \"auto\", \"none\", \"any\" or \
                         \"tool\" with a name"
                    ),
                ));
            }
        }
        choice.one |= asked.disable_parallel_tool_use == Some(true);
    }
    match request.thinking.as_ref().map(|t| t.kind.as_str()) {
        // The model decides whether it reasons.
        None | Some("adaptive") => {}
        Some("disabled") => {
            prompt
                .template
                .insert("enable_thinking".into(), false.into());
        }
        Some(_) if !model.format().reads_reasoning() => {
            return Err(ApiError::unsupported(
                "thinking",
                format!(
                    "the model {} has no thinking that can be separated from its answer; leave thinking out",
                    model.id()
                ),
            ));
        }
        Some(_) => {
            prompt
                .template
                .insert("enable_thinking".into(), true.into());
        }
    }
    Ok((prompt, choice))
}

/// Anthropic's `stop_reason`, and the stop string that ended the reply.
fn stop_reason(end: &End, called: bool) -> (&'static str, Option<&str>) {
    match (&end.reason, &end.stop) {
        (FinishReason::Length, _) => ("max_tokens", None),
        _ if called => ("tool_use", None),
        (_, Some(StopCause::String(stop))) => ("stop_sequence", Some(stop)),
        _ => ("end_turn", None),
    }
}

fn usage(metrics: &GenerateMetrics) -> Value {
    json!({
        "input_tokens": metrics.prompt_tokens.saturating_sub(metrics.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": metrics.cached_tokens,
        "output_tokens": metrics.generated_tokens,
    })
}
