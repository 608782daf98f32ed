//! Requests to `/v1/responses`. A conversation is a list of items instead of messages.

use inference::{Message, Parameter, ParameterValue, Tool, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::dialect::openai::parameters::OpenAi;
use crate::error::ApiError;
use crate::pipeline::TextOr;
use crate::pipeline::parameters::{Dialect, Parameters};

/// The fields of this API, with the limits and defaults of OpenAI's other APIs.
#[derive(Debug)]
pub(crate) struct Responses;

/// An alias without generic parameters, because the derived OpenAPI schemas require one.
pub(crate) type ResponsesParameters = Parameters<Responses>;

impl Dialect for Responses {
    const NAME: &'static str = "responses";
    const MOST_TEMPERATURE: f32 = OpenAi::MOST_TEMPERATURE;

    fn default_of(parameter: &Parameter) -> Option<ParameterValue> {
        OpenAi::default_of(parameter)
    }

    fn takes(parameter: &Parameter) -> bool {
        ["temperature", "top_p"].contains(&parameter.name())
    }
}

/// A conversation to continue.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResponsesRequest {
    /// The model's name. Without it, the server uses its first model.
    pub(super) model: Option<String>,
    /// A text, or the items of the conversation, oldest first.
    #[schema(value_type = crate::pipeline::described::TextOrList)]
    pub(super) input: Option<TextOr<Item>>,
    /// An instruction before the conversation.
    pub(super) instructions: Option<String>,
    /// Maximum number of tokens of the reply, reasoning included.
    pub(super) max_output_tokens: Option<usize>,
    #[serde(flatten)]
    pub(super) parameters: ResponsesParameters,
    /// Send the reply while it is generated.
    pub(super) stream: Option<bool>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(super) tools: Option<Vec<ToolSpec>>,
    /// `auto`, `none`, `required`, or `{"type": "function", "name": ..}`.
    #[schema(value_type = Option<crate::pipeline::described::TextOrObject>)]
    pub(super) tool_choice: Option<Value>,
    /// Whether the reply may have several calls.
    pub(super) parallel_tool_calls: Option<bool>,
    /// The format of the answer: `{"format": {"type": "json_schema", ..}}`.
    #[schema(value_type = Option<Object>)]
    pub(super) text: Option<TextOptions>,
    /// The effort of reasoning, for templates that know `reasoning_effort`.
    #[schema(value_type = Option<Object>)]
    pub(super) reasoning: Option<Reasoning>,
    /// Data that the response repeats unchanged.
    #[schema(value_type = Option<Object>)]
    pub(super) metadata: Option<Map<String, Value>>,
    /// Cached prompt prefixes are shared only between requests with the same salt (from vLLM).
    pub(super) cache_salt: Option<String>,
    /// Only `disabled` is supported: a conversation is never cut.
    pub(super) truncation: Option<String>,
    /// Not supported: responses are not kept.
    pub(super) previous_response_id: Option<String>,
    /// Not supported: responses are not kept.
    #[schema(value_type = Option<crate::pipeline::described::TextOrObject>)]
    pub(super) conversation: Option<Value>,
    /// Not supported: responses are not kept.
    pub(super) background: Option<bool>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub(super) prompt: Option<Value>,
    /// Not supported here; `/v1/chat/completions` has `top_logprobs`.
    pub(super) top_logprobs: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub(super) struct TextOptions {
    pub(super) format: Option<Format>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Format {
    Text,
    JsonObject,
    JsonSchema { name: Option<String>, schema: Value },
}

#[derive(Debug, Deserialize)]
pub(super) struct Reasoning {
    pub(super) effort: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ToolSpec {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

/// A message, a call, its output, or reasoning. Each kind uses some of the fields.
#[derive(Debug, Deserialize)]
pub(super) struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<TextOr<Part>>,
    summary: Option<TextOr<Part>>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<TextOr<Part>>,
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

impl TextOr<Part> {
    fn text(self, place: &str) -> Result<String, ApiError> {
        let parts = match self {
            TextOr::Text(text) => return Ok(text),
            TextOr::List(parts) => parts,
        };
        let mut all = String::new();
        for (i, part) in parts.into_iter().enumerate() {
            match (part.kind.as_str(), part.text, part.refusal) {
                (
                    "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text",
                    Some(text),
                    _,
                )
                | ("refusal", _, Some(text)) => all.push_str(&text),
                (kind, ..) => {
                    let shown: String = kind.chars().take(40).collect();
                    return Err(ApiError::unsupported(
                        format!("{place}[{i}]"),
                        format!("a part of type {shown:?} is not supported; only text is"),
                    ));
                }
            }
        }
        Ok(all)
    }
}

/// The messages of a conversation.
pub(super) fn messages(
    instructions: Option<String>,
    input: TextOr<Item>,
) -> Result<Vec<Message>, ApiError> {
    let mut all: Vec<Message> = instructions.map(Message::system).into_iter().collect();
    let items = match input {
        TextOr::Text(text) => {
            all.push(Message::user(text));
            return Ok(all);
        }
        TextOr::List(items) => items,
    };
    // Reasoning, text and calls of one turn are separate items, which form one message of the
    // contract.
    let mut turn: Option<Message> = None;
    for (i, item) in items.into_iter().enumerate() {
        let place = format!("input[{i}]");
        let missing = |field: &str| {
            ApiError::field(format!("{place}.{field}"), format!("{field} is missing"))
        };
        let kind = item.kind.as_deref().unwrap_or("message");
        match kind {
            "message" => {
                let role = item.role.ok_or_else(|| missing("role"))?;
                let content = item.content.ok_or_else(|| missing("content"))?;
                let content = content.text(&format!("{place}.content"))?;
                if role == "assistant" {
                    let fits = |m: &&mut Message| m.content.is_empty() && m.tool_calls.is_empty();
                    match turn.as_mut().filter(fits) {
                        Some(open) => open.content = content,
                        None => all.extend(turn.replace(Message::assistant(content))),
                    }
                } else {
                    all.extend(turn.take());
                    all.push(Message::new(role, content));
                }
            }
            "reasoning" => {
                let thought = item.content.or(item.summary);
                let thought = thought.map(|c| c.text(&format!("{place}.content")));
                let thought = thought.transpose()?.unwrap_or_default();
                all.extend(turn.take());
                let mut open = Message::assistant("");
                open.reasoning = Some(thought).filter(|t| !t.is_empty());
                turn = Some(open);
            }
            "function_call" => {
                let name = item.name.ok_or_else(|| missing("name"))?;
                let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                let text = item.arguments.unwrap_or_default();
                let arguments: Map<String, Value> = match text.trim() {
                    "" => Map::new(),
                    text => serde_json::from_str(text).map_err(|e| {
                        let message = format!("the arguments are not a JSON object: {e}");
                        ApiError::field(format!("{place}.arguments"), message)
                    })?,
                };
                let open = turn.get_or_insert_with(|| Message::assistant(""));
                open.tool_calls.push(ToolCall::new(id, name, arguments));
            }
            "function_call_output" => {
                let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                let output = item.output.ok_or_else(|| missing("output"))?;
                let output = output.text(&format!("{place}.output"))?;
                all.extend(turn.take());
                all.push(Message::tool(id, output));
            }
            kind => {
                let shown: String = kind.chars().take(40).collect();
                return Err(ApiError::unsupported(
                    place,
                    format!(
                        "an item of type {shown:?} is not supported; there are message, reasoning, \
                         function_call and function_call_output"
                    ),
                ));
            }
        }
    }
    all.extend(turn);
    Ok(all)
}

impl ToolSpec {
    /// The tool in the form in which a response repeats it.
    pub(super) fn json(&self) -> Value {
        json!({
            "type": self.kind,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict.unwrap_or_default(),
        })
    }
}

/// The tools of a request.
pub(super) fn tools(specs: &[ToolSpec]) -> Result<Vec<Tool>, ApiError> {
    let mut tools = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let object = matches!(spec.parameters, None | Some(Value::Null | Value::Object(_)));
        let (Some(name), true, true) = (&spec.name, spec.kind == "function", object) else {
            return Err(ApiError::unsupported(
                format!("tools[{i}]"),
                "only tools of type \"function\" with a name and, as parameters, an object are supported",
            ));
        };
        let mut tool = Tool::new(name, spec.parameters.clone().filter(|p| !p.is_null()));
        tool.description.clone_from(&spec.description);
        tool.strict = spec.strict.unwrap_or_default();
        tools.push(tool);
    }
    Ok(tools)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, ApiError> {
        messages(None, serde_json::from_value(value).unwrap())
    }

    #[test]
    fn items_of_a_turn_become_one_message() {
        let talk = read(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "let me see", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\":1}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "and two"},
        ]))
        .unwrap();
        let mut arguments = Map::new();
        arguments.insert("a".into(), 1.into());
        let calls = [
            ToolCall::new("c1", "f", arguments),
            ToolCall::new("c2", "g", Map::new()),
        ];
        let expected = [
            Message::user("hi"),
            Message::assistant("let me see")
                .with_reasoning("hm")
                .with_tool_calls(calls),
            Message::tool("c1", "1"),
            Message::tool("c2", "2"),
            Message::assistant("one"),
            Message::assistant("and two"),
        ];
        assert_eq!(talk, expected);
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (items, param) in [
            (json!([{"type": "item_reference", "id": "x"}]), "input[0]"),
            (json!([{"content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
                "input[0].content[0]",
            ),
            (
                json!([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]),
                "input[0].arguments",
            ),
            (
                json!([{"type": "function_call_output", "output": "x"}]),
                "input[0].call_id",
            ),
        ] {
            let error = read(items).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }
}
