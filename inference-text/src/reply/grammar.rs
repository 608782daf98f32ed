//! Grammars that force the model to call a tool. A grammar describes the text that the parsers
//! read.

use super::{Family, Tool, Tools};
use serde_json::{Map, Value, json};
use std::fmt;

/// Maximum depth at which references in a tool's schema are found.
const MAX_SCHEMA_DEPTH: usize = 128;

/// The text of a reply that consists of calls: `open shape (separator shape)* close`, where a shape
/// is `prefix JSON suffix`.
///
/// Reasoning before the calls is not included.
#[derive(Clone, Debug, PartialEq)]
pub struct CallGrammar {
    /// Text before the first call.
    pub open: String,
    /// The allowed calls, one shape for each tool.
    pub shapes: Vec<CallShape>,
    /// Text between two calls; `None` if one reply can contain only one call.
    pub separator: Option<String>,
    /// Text after the last call.
    pub close: String,
}

/// One call of one tool.
#[derive(Clone, Debug, PartialEq)]
pub struct CallShape {
    /// The tool.
    pub tool: String,
    /// Literal text before the JSON.
    pub prefix: String,
    /// The schema of the JSON: a whole call object, or only the arguments. Keys are in the order in
    /// which the family writes them.
    pub schema: Value,
    /// Literal text after the JSON.
    pub suffix: String,
}

/// Why there is no grammar for calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrammarUnavailable {
    /// The family has no tool calls.
    NoToolCalls,
    /// The family's arguments are not JSON, so a JSON schema cannot describe them.
    NotJson(Family),
    /// No tool has this name.
    UnknownTool(String),
    /// There are no tools.
    NoTools,
}

impl fmt::Display for GrammarUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoToolCalls => f.write_str("the model's format has no tool calls"),
            Self::NotJson(family) => {
                write!(
                    f,
                    "arguments of format {family} are not JSON and cannot be forced"
                )
            }
            Self::UnknownTool(name) => write!(f, "there is no tool '{name}'"),
            Self::NoTools => f.write_str("there are no tools"),
        }
    }
}

impl std::error::Error for GrammarUnavailable {}

impl Family {
    /// A grammar for a call of the tool `named`. With `None`, any tool may be called.
    ///
    /// `new_id` returns ids for families that write an id before the arguments. `first_index` is
    /// the number of calls in the conversation so far; Kimi K2's ids contain it.
    ///
    /// # Errors
    ///
    /// If the family does not write JSON, or if the tool does not exist.
    pub fn call_grammar(
        self,
        tools: &Tools,
        named: Option<&str>,
        first_index: usize,
        new_id: &mut dyn FnMut() -> String,
    ) -> Result<CallGrammar, GrammarUnavailable> {
        if self == Self::None {
            return Err(GrammarUnavailable::NoToolCalls);
        }
        let not_json = matches!(
            self,
            Self::Qwen3Coder
                | Self::Glm4Moe
                | Self::Pythonic
                | Self::Lfm2
                | Self::Olmo3
                | Self::FunctionGemma
                | Self::Gemma4
                | Self::MiniMax
        );
        if not_json {
            return Err(GrammarUnavailable::NotJson(self));
        }
        if tools.is_empty() {
            return Err(GrammarUnavailable::NoTools);
        }
        if let Some(name) = named.filter(|name| tools.get(name).is_none()) {
            return Err(GrammarUnavailable::UnknownTool(name.to_owned()));
        }
        let mut shape = |tool: &Tool| {
            let name = &tool.name;
            let (prefix, schema, suffix) = match self {
                Self::MistralCallId => (
                    format!("[TOOL_CALLS]{name}[CALL_ID]{}[ARGS]", new_id()),
                    arguments(tool),
                    "",
                ),
                Self::MistralArgs => (format!("[TOOL_CALLS]{name}[ARGS]"), arguments(tool), ""),
                Self::KimiK2 => (
                    format!(
                        "<|tool_call_begin|>functions.{name}:{first_index}\
                         <|tool_call_argument_begin|>"
                    ),
                    arguments(tool),
                    "<|tool_call_end|>",
                ),
                Self::DeepSeekV3 => (
                    format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                    arguments(tool),
                    "\n```<｜tool▁call▁end｜>",
                ),
                Self::DeepSeekV31 => (
                    format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
                    arguments(tool),
                    "<｜tool▁call▁end｜>",
                ),
                Self::Glm4 => (format!("{name}\n"), arguments(tool), "<|observation|>"),
                Self::Harmony => (
                    format!(
                        "<|channel|>commentary to=functions.{name} \
                         <|constrain|>json<|message|>"
                    ),
                    arguments(tool),
                    "<|call|>",
                ),
                Self::Hermes => (
                    String::from("<tool_call>\n"),
                    object(tool, "arguments", &[("name", name_schema(name))], &[]),
                    "\n</tool_call>",
                ),
                Self::MistralNemo => {
                    let id = json!({"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"});
                    let name = [("name", name_schema(name))];
                    (
                        String::new(),
                        object(tool, "arguments", &name, &[("id", id)]),
                        "",
                    )
                }
                Self::CommandR => {
                    let id = json!({"type": "string", "pattern": "^[0-9]{1,4}$"});
                    let fields = [("tool_call_id", id), ("tool_name", name_schema(name))];
                    (String::new(), object(tool, "parameters", &fields, &[]), "")
                }
                Self::Llama3 => {
                    let name = [("name", name_schema(name))];
                    (String::new(), object(tool, "parameters", &name, &[]), "")
                }
                // Granite 3. The other remaining families were rejected above.
                _ => {
                    let name = [("name", name_schema(name))];
                    (String::new(), object(tool, "arguments", &name, &[]), "")
                }
            };
            CallShape {
                tool: name.clone(),
                prefix,
                schema,
                suffix: suffix.to_owned(),
            }
        };
        let wanted = |tool: &&Tool| named.is_none_or(|name| tool.name == name);
        let shapes = tools.iter().filter(wanted).map(&mut shape).collect();
        let (open, separator, close) = match self {
            Self::Hermes => ("", Some("\n"), ""),
            Self::MistralArgs => ("", Some(""), ""),
            Self::MistralNemo => ("[TOOL_CALLS][", Some(", "), "]"),
            Self::CommandR => ("<|START_ACTION|>[", Some(", "), "]<|END_ACTION|>"),
            Self::Granite3 => ("<|tool_call|>[", Some(", "), "]"),
            Self::DeepSeekV3 => ("<｜tool▁calls▁begin｜>", Some("\n"), "<｜tool▁calls▁end｜>"),
            Self::DeepSeekV31 => ("<｜tool▁calls▁begin｜>", Some(""), "<｜tool▁calls▁end｜>"),
            // A further call would get the index of the first call in its id.
            Self::KimiK2 => (
                "<|tool_calls_section_begin|>",
                None,
                "<|tool_calls_section_end|>",
            ),
            // Ids must be unique, so with an id only one call is allowed. The other families write
            // one call per reply.
            _ => ("", None, ""),
        };
        Ok(CallGrammar {
            open: open.to_owned(),
            shapes,
            separator: separator.map(str::to_owned),
            close: close.to_owned(),
        })
    }
}

fn name_schema(name: &str) -> Value {
    json!({"type": "string", "const": name})
}

/// The schema of a tool's arguments. Without a schema, the arguments are an empty object.
fn arguments(tool: &Tool) -> Value {
    match &tool.parameters {
        Value::Object(schema) if !schema.is_empty() => tool.parameters.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// The schema of a call object, with the arguments' schema under `key`.
fn object(tool: &Tool, key: &str, before: &[(&str, Value)], after: &[(&str, Value)]) -> Value {
    let mut inner = arguments(tool);
    let mut outer = Map::new();
    outer.insert("type".into(), "object".into());
    // References are relative to the root, so the definitions move to the root.
    for word in ["$defs", "definitions"] {
        if let Some(mut definitions) = inner.as_object_mut().and_then(|inner| inner.remove(word)) {
            move_references(&mut definitions, key, MAX_SCHEMA_DEPTH);
            outer.insert(word.into(), definitions);
        }
    }
    move_references(&mut inner, key, MAX_SCHEMA_DEPTH);
    let mut properties = Map::new();
    let fields = before
        .iter()
        .cloned()
        .chain([(key, inner)])
        .chain(after.iter().cloned());
    for (name, schema) in fields {
        properties.insert(name.to_owned(), schema);
    }
    let required: Vec<_> = properties.keys().cloned().collect();
    outer.insert("properties".into(), Value::Object(properties));
    outer.insert("required".into(), required.into());
    outer.insert("additionalProperties".into(), false.into());
    Value::Object(outer)
}

/// Updates references to all parts except definitions, because these parts have moved.
fn move_references(schema: &mut Value, key: &str, depth: usize) {
    if depth == 0 {
        return;
    }
    match schema {
        Value::Object(map) => {
            for (word, value) in map.iter_mut() {
                match value {
                    Value::String(target) if word == "$ref" => {
                        let local = target.strip_prefix('#').filter(|path| {
                            !path.starts_with("/$defs/") && !path.starts_with("/definitions/")
                        });
                        if let Some(path) = local {
                            *target = format!("#/properties/{key}{path}");
                        }
                    }
                    _ => move_references(value, key, depth - 1),
                }
            }
        }
        Value::Array(list) => {
            for value in list {
                move_references(value, key, depth - 1);
            }
        }
        _ => {}
    }
}
