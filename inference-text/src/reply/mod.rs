//! Parses a model's reply into content, reasoning and tool calls.
//!
//! Each model family has its own syntax for tool calls and reasoning. A [`ReplyParser`] parses one
//! reply token by token, and returns [`Event`]s. Streaming and other callers use the same parser;
//! [`Reply::collect`] joins the events of a whole reply. [`ReplyStream`] combines these steps for a
//! model of any backend.
//!
//! ```
//! use inference_text::reply::{Event, Format, ParserOptions, Piece, Reply, SequentialIds};
//!
//! // The chat template tells the format.
//! let format = Format::detect("… <tool_call>\n{{ call | tojson }}\n</tool_call> …", None);
//! let options = ParserOptions::default().with_ids(SequentialIds::default());
//! let mut parser = format.parser(options);
//! let mut events = parser.feed(Piece::text("Let me see. <tool_call>\n{\"name\": \"time\", "));
//! events.extend(parser.feed(Piece::text("\"arguments\": {\"zone\": \"UTC\"}}\n</tool_call>")));
//! events.extend(parser.finish());
//!
//! let reply = Reply::collect(events);
//! assert_eq!(reply.content, "Let me see.");
//! assert_eq!(reply.calls[0].name, "time");
//! assert_eq!(reply.calls[0].arguments, r#"{"zone": "UTC"}"#);
//! ```
//!
//! # Rules for all families
//!
//! - The parsers work character by character, so token boundaries have no effect.
//! - Text that may be the start of a marker is withheld until its meaning is known.
//! - A special token that is not a marker of the format, such as an end-of-turn token, is dropped.
//!   Markers are recognized by their text, whether or not the tokenizer flags them as special,
//!   because converted tokenizers disagree about this flag.
//! - White space next to a call or to reasoning is dropped; other white space is kept.
//! - A call starts when its name is known. Its arguments follow as deltas that concatenate to one
//!   JSON object. JSON is passed through as written, except that raw control characters inside
//!   strings are escaped and lone surrogates become U+FFFD.
//! - If the syntax of a call is complete, the call is valid even without its closing marker.
//! - An unclosed or malformed call causes [`Event::Malformed`] with a [`Diagnosis`]. The text of
//!   the call follows as content, from its opening marker on. A call that had already started gets
//!   no [`Event::CallEnded`], and its index is not used again.
//! - Calls that start without any marker (Llama, Pythonic, GLM-4-0414) are recognized only at the
//!   start of a reply, and only if they name one of the tools. Other text there is content, and no
//!   fault is reported.
//! - Reasoning that is not closed at the end of the reply is still reasoning.
//! - The work is linear in the length of the reply. Memory is limited by [`Limits`].
//!
//! # Types of arguments
//!
//! In JSON families, values have JSON types. In the other families, the tool's JSON schema
//! determines the type of a value; see [`Tools`] for the rules.
//!
//! # A call inside reasoning
//!
//! The behavior follows the reference implementation of each family:
//!
//! - Qwen3-Coder (vLLM's `qwen3`): `<tool_call>` followed by `<function=` ends the reasoning;
//!   `<tool_call>` alone does not.
//! - Kimi K2 (vLLM's `kimi_k2`) and Gemma 4 (vLLM's `gemma4`): the opening marker of a call ends
//!   the reasoning.
//! - gpt-oss: a message to a function is a call, in any channel.
//! - All others (llama.cpp, vLLM): the text of the call stays reasoning.

mod choice;
mod collect;
mod engine;
mod families;
mod family;
mod gemma;
mod generic;
mod grammar;
mod harmony;
mod hold;
mod ids;
mod json_calls;
mod json_scan;
mod literal;
mod named_json;
mod pythonic;
mod sink;
mod stream;
mod tagged;
mod tools;

use std::fmt;
use std::sync::Arc;

pub use choice::Format;
pub use collect::{Call, Reply};
pub use family::{Family, ReasoningTags};
pub use generic::written;
pub use grammar::{CallBody, CallGrammar, CallShape, GrammarUnavailable, JsonStart};
pub use ids::{IdGenerator, IdStyle, RandomIds, SequentialIds};
pub use stream::{ReplyStream, TokenReader, reader};
pub use tools::{Tool, Tools};

/// One token of a reply, as input for the parser.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The token's id, if the caller knows it. The parsers do not use it, because a marker's id
    /// differs between tokenizers.
    pub id: Option<u32>,
    /// The text of the token. It must consist of whole characters, as a streaming detokenizer
    /// returns them.
    pub text: &'a str,
    /// Whether the tokenizer flags the token as special.
    pub special: bool,
}

impl<'a> Piece<'a> {
    /// A piece of ordinary text.
    pub fn text(text: &'a str) -> Self {
        Self {
            id: None,
            text,
            special: false,
        }
    }

    /// A special token.
    pub fn special(id: u32, text: &'a str) -> Self {
        Self {
            id: Some(id),
            text,
            special: true,
        }
    }
}

/// An event that a parser reports.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Text for the user.
    Content(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A call begins.
    CallStarted {
        /// Number of the call in this reply, from 0.
        index: usize,
        /// The model's own id of the call, or a generated one.
        id: String,
        /// The function to call. The model may name a function that was not offered.
        name: String,
    },
    /// A further part of the JSON text of a call's arguments.
    ArgumentsDelta {
        /// Index of the call.
        index: usize,
        /// JSON text to append.
        delta: String,
    },
    /// The arguments of a call are complete, and form a valid JSON object.
    CallEnded {
        /// Index of the call.
        index: usize,
    },
    /// A call is malformed. Its text follows as content.
    Malformed(Diagnosis),
}

/// Why a call or a header is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The reason.
    pub fault: Fault,
    /// The family whose syntax was expected.
    pub family: Family,
    /// Index of the call, if it had started. No [`Event::CallEnded`] follows for this call.
    pub index: Option<usize>,
    /// Where parsing stopped, in bytes of the reply's text.
    pub offset: usize,
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tool call of format {} at byte {}: {}",
            self.family, self.offset, self.fault
        )
    }
}

/// The reason of a [`Diagnosis`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The reply ended inside the call.
    Unclosed,
    /// The text does not follow the syntax of the family.
    Syntax,
    /// The call has no name.
    MissingName,
    /// The name is empty, too long, or has characters that are not allowed in function names.
    BadName,
    /// The arguments are JSON, but not an object.
    ArgumentsNotObject,
    /// Brackets nest deeper than [`Limits::max_depth`].
    TooDeep,
    /// The call is longer than [`Limits::max_call_bytes`].
    TooLarge,
    /// A message header of the harmony format that cannot be read.
    BadHeader,
    /// A harmony message to a recipient that is not a function.
    UnknownRecipient,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unclosed => "the reply ended inside the call",
            Self::Syntax => "the text does not follow the syntax of the format",
            Self::MissingName => "the call has no name",
            Self::BadName => "the name of the function is not usable",
            Self::ArgumentsNotObject => "the arguments are not a JSON object",
            Self::TooDeep => "the arguments nest too deeply",
            Self::TooLarge => "the call is too long",
            Self::BadHeader => "the message header cannot be read",
            Self::UnknownRecipient => "the recipient is not a function",
        })
    }
}

/// A parser of one reply.
pub trait ReplyParser: Send {
    /// Reads one more token and returns its events.
    fn feed(&mut self, piece: Piece<'_>) -> Vec<Event>;

    /// Ends the reply, and returns the remaining events. Later calls return no events.
    fn finish(&mut self) -> Vec<Event>;

    /// Whether the reply is currently inside reasoning.
    fn in_reasoning(&self) -> bool;
}

/// Limits on the memory of a parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest text of one call, in bytes. The default is 1 MiB.
    pub max_call_bytes: usize,
    /// Deepest nesting of brackets in arguments. The default is 64.
    pub max_depth: usize,
    /// Longest name of a function or of an argument, in bytes. The default is 256.
    pub max_name_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_call_bytes: 1 << 20,
            max_depth: 64,
            max_name_bytes: 256,
        }
    }
}

/// The input of a parser, besides the format.
pub struct ParserOptions {
    /// The tools that were offered. For families without JSON, their schemas determine the types of
    /// arguments.
    pub tools: Arc<Tools>,
    /// The end of the rendered prompt. It shows whether the reply begins inside reasoning.
    pub prompt_tail: String,
    /// Whether the reply starts inside reasoning. A caller can set this if the end of the prompt
    /// does not show it, for example if the prompt ends in the middle of reasoning.
    pub reasoning_open: Option<bool>,
    /// Generates ids of calls for families that write none.
    pub ids: Box<dyn IdGenerator>,
    /// Limits on the withheld text.
    pub limits: Limits,
}

impl Default for ParserOptions {
    fn default() -> Self {
        Self {
            tools: Arc::default(),
            prompt_tail: String::new(),
            reasoning_open: None,
            ids: Box::new(RandomIds::new()),
            limits: Limits::default(),
        }
    }
}

impl ParserOptions {
    /// Sets the tools that were offered.
    #[must_use]
    pub fn with_tools(mut self, tools: impl Into<Arc<Tools>>) -> Self {
        self.tools = tools.into();
        self
    }

    /// Sets the end of the prompt: the last line or the whole prompt.
    #[must_use]
    pub fn with_prompt_tail(mut self, tail: impl Into<String>) -> Self {
        self.prompt_tail = tail.into();
        self
    }

    /// Sets whether the reply begins inside reasoning.
    #[must_use]
    pub fn with_reasoning_open(mut self, open: bool) -> Self {
        self.reasoning_open = Some(open);
        self
    }

    /// Sets the generator of call ids.
    #[must_use]
    pub fn with_ids(mut self, ids: impl IdGenerator + 'static) -> Self {
        self.ids = Box::new(ids);
        self
    }

    /// Sets the limits.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }
}

impl fmt::Debug for ParserOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParserOptions")
            .field("tools", &self.tools)
            .field("prompt_tail", &self.prompt_tail)
            .field("reasoning_open", &self.reasoning_open)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
