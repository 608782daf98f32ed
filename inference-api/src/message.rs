//! The input of a model: messages with their tool calls, conversations and prompts.

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::error::{Error, ErrorKind, Result};

/// One turn of a conversation.
///
/// In JSON it has the shape of OpenAI's chat API: `role` and `content`, and if set, `name`,
/// `reasoning_content`, `tool_calls` and `tool_call_id`. The arguments of `tool_calls` are a string
/// that contains JSON. `content` may also be a list of text parts, which are concatenated, or
/// `null` beside tool calls. Other fields are ignored.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The role: `system`, `user`, `assistant`, `tool`, or another one that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// The name of the participant, or of the tool that answers.
    pub name: Option<String>,
    /// The model's reasoning before its answer.
    pub reasoning: Option<String>,
    /// The tools that the model calls.
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that a message with the role `tool` answers.
    pub tool_call_id: Option<String>,
}

/// A call of a tool by the model.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The id within the conversation; the answer repeats it.
    pub id: String,
    /// The tool.
    pub name: String,
    /// The arguments by name.
    pub arguments: Map<String, Value>,
}

/// A tool that the model may call: a function, its description, and the JSON schema of its
/// arguments.
///
/// In JSON: `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tool {
    /// The name with which the model calls the tool.
    pub name: String,
    /// The description for the model.
    pub description: Option<String>,
    /// The JSON schema of its arguments, an object.
    pub parameters: Option<Value>,
    /// Whether the client wants arguments to match the schema. Backends do not enforce it. A
    /// grammar for the call does, if one is set.
    pub strict: bool,
}

/// Where the text of a conversation ends.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatEnd {
    /// After the last message, where the model's reply begins (`add_generation_prompt`).
    #[default]
    Reply,
    /// Within the last message, which the model continues (`continue_final_message`).
    LastMessage,
    /// After the last message, without the text that begins a reply.
    Messages,
}

/// Where the text of a conversation begins.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatStart {
    /// At the first message, including the text that the template puts before it.
    #[default]
    Conversation,
    /// At the text of the last message. The earlier messages are already in a cache.
    LastMessage,
}

/// A conversation with the other inputs of a chat template.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The turns, oldest first.
    pub messages: Vec<Message>,
    /// The tools that the model may call.
    pub tools: Vec<Tool>,
    /// Additional variables for the template, such as `enable_thinking`.
    pub template: Map<String, Value>,
    /// Where the text ends.
    pub end: ChatEnd,
    /// Where the text begins.
    pub start: ChatStart,
}

impl Message {
    /// A message with any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            ..Self::default()
        }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// An instruction to the model.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// Creates a message with a tool's answer to the call `id`.
    pub fn tool(id: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            tool_call_id: Some(id.into()),
            ..Self::new("tool", content)
        }
    }

    /// Sets the participant's or the tool's name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the model's reasoning.
    #[must_use]
    pub fn with_reasoning(mut self, reasoning: impl Into<String>) -> Self {
        self.reasoning = Some(reasoning.into());
        self
    }

    /// Sets the tools that the model calls.
    #[must_use]
    pub fn with_tool_calls(mut self, tool_calls: impl Into<Vec<ToolCall>>) -> Self {
        self.tool_calls = tool_calls.into();
        self
    }

    /// Whether the message has only a role and a content.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.name.is_none()
            && self.reasoning.is_none()
            && self.tool_calls.is_empty()
            && self.tool_call_id.is_none()
    }

    /// Returns the message in the form that chat templates expect. By Hugging Face's convention,
    /// arguments of tool calls are objects, not strings.
    #[must_use]
    pub fn to_template(&self) -> Value {
        self.json(|arguments| Value::Object(arguments.clone()))
    }

    fn json(&self, arguments: impl Fn(&Map<String, Value>) -> Value) -> Value {
        let mut fields = Map::new();
        let mut text = |name: &str, text: Option<&String>| {
            if let Some(text) = text {
                fields.insert(name.into(), text.as_str().into());
            }
        };
        text("role", Some(&self.role));
        text("content", Some(&self.content));
        text("name", self.name.as_ref());
        text("reasoning_content", self.reasoning.as_ref());
        text("tool_call_id", self.tool_call_id.as_ref());
        if !self.tool_calls.is_empty() {
            let call = |call: &ToolCall| {
                json!({
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments(&call.arguments)},
                })
            };
            fields.insert(
                "tool_calls".into(),
                self.tool_calls.iter().map(call).collect(),
            );
        }
        Value::Object(fields)
    }
}

impl ToolCall {
    /// A call.
    pub fn new(
        id: impl Into<String>,
        name: impl Into<String>,
        arguments: Map<String, Value>,
    ) -> Self {
        Self {
            id: id.into(),
            name: name.into(),
            arguments,
        }
    }
}

impl Tool {
    /// A tool with the JSON schema of its arguments.
    pub fn new(name: impl Into<String>, parameters: impl Into<Option<Value>>) -> Self {
        Self {
            name: name.into(),
            description: None,
            parameters: parameters.into(),
            strict: false,
        }
    }

    /// Sets the description.
    #[must_use]
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = Some(description.into());
        self
    }

    /// Returns the tool in the form that chat templates expect.
    #[must_use]
    pub fn to_template(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.name.as_str().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.as_str().into());
        }
        if let Some(parameters) = &self.parameters {
            function.insert("parameters".into(), parameters.clone());
        }
        json!({"type": "function", "function": function})
    }
}

impl ChatPrompt {
    /// A conversation that the model answers.
    pub fn new(messages: impl Into<Vec<Message>>) -> Self {
        Self {
            messages: messages.into(),
            ..Self::default()
        }
    }

    /// Sets the tools that the model may call.
    #[must_use]
    pub fn with_tools(mut self, tools: impl Into<Vec<Tool>>) -> Self {
        self.tools = tools.into();
        self
    }

    /// Adds a variable for the template.
    #[must_use]
    pub fn with_template(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.template.insert(name.into(), value.into());
        self
    }

    /// Sets where the text ends.
    #[must_use]
    pub fn with_end(mut self, end: ChatEnd) -> Self {
        self.end = end;
        self
    }

    /// Sets where the text begins.
    #[must_use]
    pub fn with_start(mut self, start: ChatStart) -> Self {
        self.start = start;
        self
    }

    /// Returns an error if the conversation has more than roles and contents. It is for backends
    /// that support nothing else.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], unless [`ChatPrompt::is_plain`].
    pub fn check_plain(&self) -> Result<()> {
        if self.is_plain() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend knows only roles and contents of messages; leave out tools, tool calls, names, \
             reasoning, template arguments and continued messages",
        ))
    }

    /// Whether the conversation has only roles and contents, and is neither continued nor partial.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.messages.iter().all(Message::is_plain)
            && self.tools.is_empty()
            && self.template.is_empty()
            && self.end != ChatEnd::LastMessage
            && self.start == ChatStart::Conversation
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |arguments: &Map<String, Value>| {
            Value::String(Value::Object(arguments.clone()).to_string())
        };
        self.json(text).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            role: String,
            #[serde(default)]
            content: Option<Content>,
            name: Option<String>,
            #[serde(alias = "reasoning")]
            reasoning_content: Option<String>,
            tool_calls: Option<Vec<ToolCall>>,
            tool_call_id: Option<String>,
        }
        let fields = Fields::deserialize(deserializer)?;
        let tool_calls = fields.tool_calls.unwrap_or_default();
        let content = match fields.content {
            Some(content) => content.text().map_err(D::Error::custom)?,
            // A tool call needs no content.
            None if !tool_calls.is_empty() => String::new(),
            None => return Err(D::Error::missing_field("content")),
        };
        Ok(Self {
            role: fields.role,
            content,
            name: fields.name,
            reasoning: fields.reasoning_content,
            tool_calls,
            tool_call_id: fields.tool_call_id,
        })
    }
}

/// The content in the forms that clients send. Its deserializer is handwritten, because serde's
/// `untagged` first copies the value.
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

enum Part {
    Text(String),
    Object { kind: String, text: Option<String> },
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Content;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list of parts")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(rename = "type")]
            kind: String,
            text: Option<String>,
        }
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Part;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a part with a type")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part::Text(text.to_owned()))
            }
            fn visit_string<E: de::Error>(self, text: String) -> Result<Part, E> {
                Ok(Part::Text(text))
            }
            fn visit_map<A: MapAccess<'de>>(self, part: A) -> Result<Part, A::Error> {
                let Fields { kind, text } = Fields::deserialize(MapAccessDeserializer::new(part))?;
                Ok(Part::Object { kind, text })
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl Content {
    fn text(self) -> Result<String, String> {
        let parts = match self {
            Content::Text(text) => return Ok(text),
            Content::Parts(parts) => parts,
        };
        let mut all = String::new();
        for (i, part) in parts.into_iter().enumerate() {
            match part {
                Part::Text(text) => all.push_str(&text),
                Part::Object { kind, text } => match text {
                    Some(text)
                        if matches!(kind.as_str(), "text" | "input_text" | "output_text") =>
                    {
                        all.push_str(&text);
                    }
                    _ => {
                        return Err(format!(
                            "content[{i}] is a part of type {kind:?}; only parts of type \"text\" with \
                             a text are supported"
                        ));
                    }
                },
            }
        }
        Ok(all)
    }
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("type", "function")?;
        let arguments = Value::Object(self.arguments.clone()).to_string();
        map.serialize_entry(
            "function",
            &json!({"name": self.name, "arguments": arguments}),
        )?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for ToolCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(default)]
            id: String,
            function: Function,
        }
        #[derive(Deserialize)]
        struct Function {
            name: String,
            arguments: Option<Value>,
        }
        let Fields { id, function } = Fields::deserialize(deserializer)?;
        let name = function.name;
        let arguments = match function.arguments {
            Some(Value::String(text)) if !text.trim().is_empty() => serde_json::from_str(&text)
                .map_err(|e| {
                    D::Error::custom(format!(
                        "the arguments of the call of {name:?} are not JSON: {e}"
                    ))
                })?,
            None | Some(Value::Null | Value::String(_)) => Value::Object(Map::new()),
            Some(other) => other,
        };
        let Value::Object(arguments) = arguments else {
            return Err(D::Error::custom(format!(
                "the arguments of the call of {name:?} are not a JSON object"
            )));
        };
        Ok(Self {
            id,
            name,
            arguments,
        })
    }
}

impl Serialize for Tool {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = self.to_template();
        if self.strict {
            value["function"]["strict"] = true.into();
        }
        value.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(rename = "type")]
            kind: String,
            function: Option<Function>,
        }
        #[derive(Deserialize)]
        struct Function {
            name: String,
            description: Option<String>,
            parameters: Option<Value>,
            strict: Option<bool>,
        }
        let Fields { kind, function } = Fields::deserialize(deserializer)?;
        if kind != "function" {
            return Err(D::Error::custom(format!(
                "a tool is of type {kind:?}; only \"function\" is supported"
            )));
        }
        let function = function.ok_or_else(|| D::Error::missing_field("function"))?;
        if !matches!(
            function.parameters,
            None | Some(Value::Null | Value::Object(_))
        ) {
            return Err(D::Error::custom(format!(
                "the parameters of the tool {:?} are not a JSON schema; it must be an object",
                function.name
            )));
        }
        Ok(Self {
            name: function.name,
            description: function.description,
            parameters: function.parameters.filter(|p| !p.is_null()),
            strict: function.strict.unwrap_or_default(),
        })
    }
}

/// The input that a model continues.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text without a chat template, encoded with the special tokens that the model expects around
    /// it.
    Text(String),
    /// Token ids, used unchanged.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Prompt::Text(text.to_owned())
    }
}
impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt::Text(text)
    }
}
impl From<&String> for Prompt {
    fn from(text: &String) -> Self {
        Prompt::Text(text.clone())
    }
}
impl From<Vec<u32>> for Prompt {
    fn from(ids: Vec<u32>) -> Self {
        Prompt::Tokens(ids)
    }
}
impl From<&[u32]> for Prompt {
    fn from(ids: &[u32]) -> Self {
        Prompt::Tokens(ids.to_vec())
    }
}
impl<const N: usize> From<[u32; N]> for Prompt {
    fn from(ids: [u32; N]) -> Self {
        Prompt::Tokens(ids.to_vec())
    }
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
