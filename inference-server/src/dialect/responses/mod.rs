//! `/v1/responses`, OpenAI's newer form of a chat, and `/v1/responses/input_tokens`. The server
//! stores no conversations, so a client sends the whole conversation with each request.

mod output;
mod types;

use std::convert::Infallible;
use std::time::Instant;

use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use inference::{ChatPrompt, GenerateOptions};
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::dialect::openai::chat::now;
use crate::dialect::openai::options;
use crate::error::ApiError;
use crate::models::ServedModel;
use crate::pipeline::ask::Ask;
use crate::pipeline::choice::ToolChoice;
use crate::pipeline::events::sse;
use crate::pipeline::run::{Item, Reply};
use crate::pipeline::{Work, at_most, parameters, prepare};
use crate::state::App;
use output::Output;
use types::{Format, ResponsesRequest};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create))
        .route("/responses", axum::routing::post(create))
        .routes(routes!(count_tokens))
}

/// Answers a conversation, given as items.
#[utoipa::path(post, path = "/v1/responses", request_body = ResponsesRequest, responses(
    (status = 200, description = "a response, or with `stream` its events", content((Object = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(mut request, places): Work<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    refuse(&request)?;
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let options = sampling(&app, model, &request)?;
    let asked = options::asked("max_output_tokens", request.max_output_tokens)?;
    let mut ask = Ask::new(&app, options, arrived)?;
    ask.most = ("max_output_tokens", asked);
    ask.streamed = request.stream.unwrap_or(false);
    let streamed = ask.streamed;
    check_sizes(&app, &request)?;
    let fields = response(&app, model, &request)?;
    let (prompt, choice) = conversation(&mut request)?;

    // The response repeats fields of the request, so the memory reserved for the request stays
    // reserved.
    let body = places.body();
    let asked = ask.chat(&app, model, places, prompt, &choice).await?;
    let mut reply = asked.one()?;
    let names = app.clone();
    let output = Output::new(fields, move |prefix| {
        let _ = &body;
        names.name(prefix)
    });
    if streamed {
        return Ok(answer(reply, output, app.limits.ping));
    }
    let (mut output, mut last) = (output.last_only(), None);
    while let Some(item) = reply.next().await {
        if let Item::Failed(error) = item {
            return Err(error);
        }
        let (mut events, _) = output.of(item);
        last = events.pop();
    }
    // The last event contains the whole response.
    let complete = last.as_mut().map(|event| event["response"].take());
    let complete = complete.filter(Value::is_object);
    Ok(axum::Json(complete.ok_or_else(ApiError::internal)?).into_response())
}

/// Counts the tokens of a conversation, given as items.
#[utoipa::path(post, path = "/v1/responses/input_tokens", request_body = ResponsesRequest, responses(
    (status = 200, description = "`input_tokens`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn count_tokens(
    State(app): State<App>,
    Work(mut request, places): Work<ResponsesRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    refuse(&request)?;
    let model = &app.models.get(request.model.as_deref(), None).await?;
    check_sizes(&app, &request)?;
    let (prompt, _) = conversation(&mut request)?;
    let (_, prepared) = prepare::chat(&app, model, places, prompt).await?;
    Ok(axum::Json(json!({
        "object": "response.input_tokens",
        "input_tokens": prepared.ids.len(),
    })))
}

/// Refuses instructions and tools that are too large.
fn check_sizes(app: &App, request: &ResponsesRequest) -> Result<(), ApiError> {
    let instructions = request.instructions.as_ref().map_or(0, String::len);
    prepare::check_bytes(app, instructions)?;
    let tools = types::tools(request.tools.as_deref().unwrap_or_default())?;
    prepare::check_tools(app, &tools)
}

/// Answers with the events of a reply.
fn answer(reply: Reply, output: Output, ping: std::time::Duration) -> Response {
    let all = stream::unfold(Some((reply, output)), |state| async {
        let (mut reply, mut output) = state?;
        let item = reply.next().await?;
        let (events, more) = output.of(item);
        let events: Vec<Result<Event, Infallible>> = events
            .into_iter()
            .map(|value| {
                let name = value["type"].as_str().unwrap_or("error").to_owned();
                Ok(Event::default().event(name).data(value.to_string()))
            })
            .collect();
        Some((events, more.then_some((reply, output))))
    });
    sse(all.flat_map(stream::iter), ping)
}

/// Refuses unsupported fields by name.
fn refuse(request: &ResponsesRequest) -> Result<(), ApiError> {
    let some = |value: &Option<Value>| value.as_ref().is_some_and(|v| !v.is_null());
    let not_stored = "responses are not kept; send the whole conversation as input";
    let cut = request.truncation.as_deref();
    for (param, there, instead) in [
        (
            "previous_response_id",
            request.previous_response_id.is_some(),
            not_stored,
        ),
        ("conversation", some(&request.conversation), not_stored),
        ("background", request.background == Some(true), not_stored),
        (
            "prompt",
            some(&request.prompt),
            "use instructions and input",
        ),
        (
            "top_logprobs",
            request.top_logprobs.is_some_and(|n| n > 0),
            "use /v1/chat/completions",
        ),
        (
            "truncation",
            cut.is_some_and(|t| t != "disabled"),
            "shorten the input",
        ),
    ] {
        if there {
            let message = format!("{param} is not supported; {instead}");
            return Err(ApiError::unsupported(param, message));
        }
    }
    metadata(request)
}

/// OpenAI's limits on `metadata`: pairs, characters of a key, characters of a value.
const METADATA: (usize, usize, usize) = (16, 64, 512);

fn metadata(request: &ResponsesRequest) -> Result<(), ApiError> {
    let (pairs, of_key, of_value) = METADATA;
    let all = request.metadata.iter().flatten();
    at_most("metadata", all.clone().count(), pairs)?;
    let within = |text: &str, most: usize| text.chars().nth(most).is_none();
    for (key, value) in all {
        if !within(key, of_key) || !value.as_str().is_some_and(|v| within(v, of_value)) {
            let message = format!(
                "metadata has keys of at most {of_key} characters, and values that are texts of at \
                 most {of_value}"
            );
            return Err(ApiError::field("metadata", message));
        }
    }
    Ok(())
}

fn sampling(
    app: &App,
    model: &ServedModel,
    request: &ResponsesRequest,
) -> Result<GenerateOptions, ApiError> {
    let mut o = options::base(app, model)?;
    request.parameters.apply(&mut o)?;
    o.prefill.cache_salt = prepare::salt(request.cache_salt.as_ref())?;
    let param = "text.format";
    o.constraints.grammar = match request.text.as_ref().and_then(|t| t.format.as_ref()) {
        None | Some(Format::Text) => None,
        Some(Format::JsonObject) => {
            let object = json!({"type": "object"});
            Some(prepare::grammar(app, model, param, &object)?)
        }
        Some(Format::JsonSchema { schema, .. }) => {
            Some(prepare::grammar(app, model, param, schema)?)
        }
    };
    Ok(o)
}

fn conversation(request: &mut ResponsesRequest) -> Result<(ChatPrompt, ToolChoice), ApiError> {
    let Some(input) = request.input.take() else {
        return Err(ApiError::field("input", "there is no input"));
    };
    let mut prompt = ChatPrompt::new(types::messages(request.instructions.take(), input)?);
    prompt.tools = types::tools(&request.tools.take().unwrap_or_default())?;
    let mut choice = match request.tool_choice.take() {
        None | Some(Value::Null) => ToolChoice::default(),
        Some(Value::String(word)) if word == "auto" => ToolChoice::default(),
        Some(Value::String(word)) if word == "none" => {
            prompt.tools.clear();
            ToolChoice::none()
        }
        Some(Value::String(word)) if word == "required" => ToolChoice {
            required: true,
            ..ToolChoice::default()
        },
        Some(choice) => match (choice["type"].as_str(), choice["name"].as_str()) {
            (Some("function"), Some(name)) => ToolChoice::tool(name.to_owned()),
            _ => {
                let shown: String = choice.to_string().chars().take(100).collect();
                return Err(ApiError::unsupported(
                    "tool_choice",
                    format!(
                        "tool_choice {shown} is not supported; use \"auto\", \"none\", \"required\" or \
                         {{\"type\": \"function\", \"name\": ..}}"
                    ),
                ));
            }
        },
    };
    choice.one |= request.parallel_tool_calls == Some(false);
    if let Some(effort) = request.reasoning.as_mut().and_then(|r| r.effort.take()) {
        prompt
            .template
            .insert("reasoning_effort".into(), effort.into());
    }
    Ok((prompt, choice))
}

/// The fields of a response that are known before it begins.
fn response(app: &App, model: &ServedModel, request: &ResponsesRequest) -> Result<Value, ApiError> {
    let format = match request.text.as_ref().and_then(|t| t.format.as_ref()) {
        None | Some(Format::Text) => json!({"type": "text"}),
        Some(Format::JsonObject) => json!({"type": "json_object"}),
        Some(Format::JsonSchema { name, schema }) => {
            json!({"type": "json_schema", "name": name, "schema": schema, "strict": true})
        }
    };
    let tools: Vec<Value> = request
        .tools
        .iter()
        .flatten()
        .map(types::ToolSpec::json)
        .collect();
    let effort = request.reasoning.as_ref().and_then(|r| r.effort.clone());
    let base = parameters::as_json(&options::base(app, model)?);
    let effective = |name: &str| match request.parameters.get(name) {
        Some(value) => value.into(),
        None => base.get(name).cloned().unwrap_or_default(),
    };
    Ok(json!({
        "id": app.name("resp_"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "error": null,
        "incomplete_details": null,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model.id(),
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": null,
        "reasoning": {"effort": effort, "summary": null},
        "store": false,
        "temperature": effective("temperature"),
        "text": {"format": format},
        "tool_choice": request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
        "tools": tools,
        "top_p": effective("top_p"),
        "truncation": "disabled",
        "usage": null,
        "metadata": request.metadata.clone().unwrap_or_default(),
    }))
}
