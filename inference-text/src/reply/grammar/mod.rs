//! Grammars that force the model to call a tool. A grammar describes the text that the parsers
//! read.

mod json;
mod json_start;
mod lark;
mod schema;
mod syntax;
mod tagged;
mod values;

use super::{Family, Tool, Tools};
use json::{arguments, name_schema, object};
pub use json_start::JsonStart;
use serde_json::{Value, json};
use std::fmt;
use syntax::Syntax;

/// The text of a reply that consists of calls: `open shape (separator shape)* close`, where a shape
/// is `prefix body suffix`.
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
    /// Literal text before the body.
    pub prefix: String,
    /// The arguments, or the whole call object.
    pub body: CallBody,
    /// Literal text after the body.
    pub suffix: String,
}

/// The part of a call that contains the arguments.
#[derive(Clone, Debug, PartialEq)]
pub enum CallBody {
    /// JSON of this schema: a whole call object, or only the arguments. Keys are in the order in
    /// which the family writes them.
    Json(Value),
    /// Arguments in the family's own syntax.
    Rules {
        /// The name of the first rule.
        start: String,
        /// Rules in Lark's syntax, one per line. Their names are unique within a [`CallGrammar`].
        rules: String,
    },
}

/// Why there is no grammar for calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrammarUnavailable {
    /// The family has no tool calls.
    NoToolCalls,
    /// The family's syntax cannot express a part of a tool's schema.
    Inexpressible {
        /// The family.
        family: Family,
        /// The tool.
        tool: String,
        /// The part, such as a keyword.
        what: String,
    },
    /// No tool has this name.
    UnknownTool(String),
    /// There are no tools.
    NoTools,
}

impl fmt::Display for GrammarUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoToolCalls => f.write_str("the model's format has no tool calls"),
            Self::Inexpressible { family, tool, what } => write!(
                f,
                "a call of tool '{tool}' cannot be forced in format {family}: {what}"
            ),
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
    /// If the family has no calls, if the tool does not exist, or if the family's syntax cannot
    /// express a tool's schema.
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
        if tools.is_empty() {
            return Err(GrammarUnavailable::NoTools);
        }
        if let Some(name) = named.filter(|name| tools.get(name).is_none()) {
            return Err(GrammarUnavailable::UnknownTool(name.to_owned()));
        }
        let own = Syntax::of(self);
        let mut shape = |(index, tool): (usize, &Tool)| {
            let name = &tool.name;
            if let Some(syntax) = &own {
                return syntax.shape(self, tools, tool, index);
            }
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
                // Granite 3. The families with a syntax of their own were handled above.
                _ => {
                    let name = [("name", name_schema(name))];
                    (String::new(), object(tool, "arguments", &name, &[]), "")
                }
            };
            Ok(CallShape {
                tool: name.clone(),
                prefix,
                body: CallBody::Json(schema),
                suffix: suffix.to_owned(),
            })
        };
        let wanted = |tool: &&Tool| named.is_none_or(|name| tool.name == name);
        let shapes = tools
            .iter()
            .filter(wanted)
            .enumerate()
            .map(&mut shape)
            .collect::<Result<_, _>>()?;
        let (open, separator, close) = match self {
            Self::Hermes | Self::Qwen3Coder | Self::Glm4Moe => ("", Some("\n"), ""),
            Self::FunctionGemma | Self::Gemma4 => ("", Some(""), ""),
            // The line break after a call belongs to the call.
            Self::MiniMax => ("<minimax:tool_call>\n", Some(""), "</minimax:tool_call>"),
            Self::Pythonic => ("[", Some(", "), "]"),
            Self::Lfm2 => ("<|tool_call_start|>[", Some(", "), "]<|tool_call_end|>"),
            Self::Olmo3 => ("<function_calls>", Some("\n"), "</function_calls>"),
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
