//! Requests of Anthropic's API, and their conversion to messages of the contract.

use inference::{Message, Parameter, ParameterValue, Tool, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::pipeline::TextOr;
use crate::pipeline::parameters::{Dialect, Parameters};

/// Anthropic's fields, defaults and limits.
#[derive(Debug)]
pub(crate) struct Anthropic;

/// An alias without generic parameters, because the derived OpenAPI schemas require one.
pub(crate) type AnthropicParameters = Parameters<Anthropic>;

impl Dialect for Anthropic {
    const NAME: &'static str = "anthropic";
    const MOST_TEMPERATURE: f32 = 1.0;

    fn default_of(parameter: &Parameter) -> Option<ParameterValue> {
        (parameter.name() == "temperature").then_some(ParameterValue::Real(1.0))
    }

    fn takes(parameter: &Parameter) -> bool {
        ["temperature", "top_p", "top_k"].contains(&parameter.name())
    }
}

/// A conversation to answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MessagesRequest {
    /// The model's name. Without it, the server uses its first model.
    pub(crate) model: Option<String>,
    /// Maximum number of tokens of the reply.
    pub(crate) max_tokens: usize,
    /// The turns, oldest first.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Turn>,
    /// An instruction, as a text or as blocks of text.
    #[schema(value_type = Option<crate::pipeline::described::TextOrList>)]
    system: Option<TextOr<TextBlock>>,
    #[serde(flatten)]
    pub(crate) parameters: AnthropicParameters,
    /// Cached prompt prefixes are shared only between requests with the same salt (from vLLM).
    pub(crate) cache_salt: Option<String>,
    /// Strings that end the reply.
    pub(crate) stop_sequences: Option<Vec<String>>,
    /// Send the reply while it is generated.
    pub(crate) stream: Option<bool>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<ToolSpec>>,
    /// `{"type": ..}`: `auto`, `none`, `any`, or `tool` with a `name`.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Choice>,
    /// `{"type": "disabled"}`; or `enabled`, if the server can parse the model's reasoning.
    #[schema(value_type = Option<Object>)]
    pub(crate) thinking: Option<Thinking>,
    /// `{"format": {"type": "json_schema", "schema": ..}}`.
    #[schema(value_type = Option<Object>)]
    pub(crate) output_config: Option<OutputConfig>,
    /// Another name of `output_config.format`.
    #[schema(value_type = Option<Object>)]
    pub(crate) output_format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct OutputConfig {
    pub(crate) format: Option<OutputFormat>,
}

/// The format that the reply must have.
#[derive(Debug, Deserialize)]
pub(crate) struct OutputFormat {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) schema: Option<Value>,
}

/// A conversation to count.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CountRequest {
    /// The model's name. Without it, the server uses its first model.
    pub(crate) model: Option<String>,
    /// The turns, oldest first.
    #[schema(value_type = Vec<Object>)]
    pub(crate) messages: Vec<Turn>,
    /// An instruction.
    #[schema(value_type = Option<crate::pipeline::described::TextOrList>)]
    pub(crate) system: Option<TextOr<TextBlock>>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) tools: Option<Vec<ToolSpec>>,
    /// `{"type": ..}`: `auto`, `none`, `any`, or `tool` with a `name`.
    #[schema(value_type = Option<Object>)]
    pub(crate) tool_choice: Option<Choice>,
    /// `{"type": "disabled"}`.
    #[schema(value_type = Option<Object>)]
    pub(crate) thinking: Option<Thinking>,
}

impl From<MessagesRequest> for CountRequest {
    fn from(request: MessagesRequest) -> Self {
        Self {
            model: request.model,
            messages: request.messages,
            system: request.system,
            tools: request.tools,
            tool_choice: request.tool_choice,
            thinking: request.thinking,
        }
    }
}

/// Whether the model reasons before its answer.
#[derive(Debug, Deserialize)]
pub(crate) struct Thinking {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Maximum number of reasoning tokens, below `max_tokens`.
    pub(crate) budget_tokens: Option<usize>,
}

impl Thinking {
    /// Maximum number of reasoning tokens, if reasoning is on.
    pub(crate) fn budget(&self) -> Option<usize> {
        self.budget_tokens.filter(|_| self.kind == "enabled")
    }
}

/// Which tools may or must be called.
#[derive(Debug, Deserialize)]
pub(crate) struct Choice {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) name: Option<String>,
    pub(crate) disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ToolSpec {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Turn {
    role: String,
    content: TextOr<Block>,
}

/// A block of an instruction or of a tool's result. Only text is supported.
#[derive(Debug, Deserialize)]
pub(crate) struct TextBlock {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// A block of any type. The type determines which fields it must have.
#[derive(Debug, Deserialize)]
pub(crate) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<TextOr<TextBlock>>,
}

impl TextOr<TextBlock> {
    /// The text of a field whose blocks must all be text.
    fn text(self, place: &str) -> Result<String, ApiError> {
        let blocks = match self {
            TextOr::Text(text) => return Ok(text),
            TextOr::List(blocks) => blocks,
        };
        let mut all = String::new();
        for (i, block) in blocks.into_iter().enumerate() {
            match (block.kind.as_str(), block.text) {
                ("text", Some(text)) => all.push_str(&text),
                (kind, _) => return Err(unknown(&format!("{place}.{i}"), kind)),
            }
        }
        Ok(all)
    }
}

fn unknown(place: &str, kind: &str) -> ApiError {
    let shown: String = kind.chars().take(40).collect();
    ApiError::unsupported(
        place,
        format!("{place}: a block of type {shown:?} is not supported here, or lacks a field"),
    )
}

/// The messages of a conversation. Tool results of a turn become separate messages before the rest
/// of the turn.
pub(crate) fn messages(
    system: Option<TextOr<TextBlock>>,
    turns: Vec<Turn>,
) -> Result<Vec<Message>, ApiError> {
    let mut all = Vec::new();
    if let Some(mut system) = system {
        if let TextOr::List(blocks) = &mut system {
            // Some clients send a block with billing data, which differs in each request. The block
            // is no instruction, and would prevent reuse of the cached prefix.
            let accounts = |b: &TextBlock| {
                let text = b.text.as_deref().unwrap_or_default();
                text.starts_with("x-anthropic-billing-header:")
            };
            blocks.retain(|block| !accounts(block));
        }
        let text = system.text("system")?;
        if !text.is_empty() {
            all.push(Message::system(text));
        }
    }
    for (n, turn) in turns.into_iter().enumerate() {
        let place = format!("messages.{n}.content");
        if !matches!(turn.role.as_str(), "user" | "assistant" | "system") {
            return Err(ApiError::field(
                format!("messages.{n}.role"),
                "a role must be \"user\", \"assistant\" or \"system\"",
            ));
        }
        let blocks = match turn.content {
            TextOr::Text(text) => {
                all.push(Message::new(turn.role, text));
                continue;
            }
            TextOr::List(blocks) => blocks,
        };
        let (mut text, mut reasoning, mut calls) = (String::new(), None, Vec::new());
        let (mut results, mut said) = (0, false);
        for (i, block) in blocks.into_iter().enumerate() {
            let place = format!("{place}.{i}");
            match block {
                Block {
                    kind,
                    text: Some(more),
                    ..
                } if kind == "text" => {
                    text.push_str(&more);
                    said = true;
                }
                Block {
                    kind,
                    thinking: Some(more),
                    ..
                } if kind == "thinking" => reasoning = Some(more),
                // Only the service that encrypted this block can read it, so the server ignores it.
                Block { kind, .. } if kind == "redacted_thinking" => {}
                Block {
                    kind,
                    id: Some(id),
                    name: Some(name),
                    input,
                    ..
                } if kind == "tool_use" => {
                    calls.push(ToolCall::new(id, name, input.unwrap_or_default()));
                }
                Block {
                    kind,
                    tool_use_id: Some(id),
                    content,
                    ..
                } if kind == "tool_result" => {
                    let content = content.map(|c| c.text(&place)).transpose()?;
                    all.push(Message::tool(id, content.unwrap_or_default()));
                    results += 1;
                }
                Block { kind, .. } => return Err(unknown(&place, &kind)),
            }
        }
        if said || results == 0 {
            let mut message = Message::new(turn.role, text).with_tool_calls(calls);
            message.reasoning = reasoning;
            all.push(message);
        }
    }
    Ok(all)
}

/// The tools of a request.
pub(crate) fn tools(specs: Vec<ToolSpec>) -> Result<Vec<Tool>, ApiError> {
    let mut tools = Vec::new();
    for (i, spec) in specs.into_iter().enumerate() {
        let custom = matches!(spec.kind.as_deref(), None | Some("custom"));
        if !custom || !matches!(spec.input_schema, None | Some(Value::Object(_))) {
            return Err(ApiError::unsupported(
                format!("tools.{i}"),
                "only tools of the client with an input_schema, an object, are supported",
            ));
        }
        let mut tool = Tool::new(spec.name, spec.input_schema);
        tool.description = spec.description;
        tools.push(tool);
    }
    Ok(tools)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Vec<Message>, ApiError> {
        messages(None, serde_json::from_value(value).unwrap())
    }

    #[test]
    fn blocks_become_messages() {
        let talk = read(json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                {"type": "text", "text": "well?"},
            ]},
        ]))
        .unwrap();
        let mut arguments = Map::new();
        arguments.insert("a".into(), 1.into());
        let expected = [
            Message::user("hi"),
            Message::assistant("let me see")
                .with_reasoning("hm")
                .with_tool_calls([ToolCall::new("t1", "f", arguments)]),
            Message::tool("t1", "1"),
            Message::user("well?"),
        ];
        assert_eq!(talk, expected);
    }

    #[test]
    fn a_line_of_accounts_is_no_instruction() {
        let system = json!([
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1f2e;"},
            {"type": "text", "text": "Be brief."},
        ]);
        let system = serde_json::from_value(system).unwrap();
        let talk = messages(Some(system), Vec::new()).unwrap();
        assert_eq!(talk, [Message::system("Be brief.")]);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
        let error = read(image).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages.0.content.0"));
        assert!(error.message.contains("image"));
        let role = read(json!([{"role": "robot", "content": "x"}])).unwrap_err();
        assert_eq!(role.param.as_deref(), Some("messages.0.role"));
    }
}
