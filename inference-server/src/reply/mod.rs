//! Splits a reply's tokens into text, reasoning and tool calls. Model families write these parts in
//! different formats. `detected` parses the formats that `inference-text` knows.

mod budget;
mod call_or_json;
mod detected;
mod forced;

use inference::{ChatPrompt, Grammar, PreparedPrompt, Result, StopCause, Token, Tool};

pub use budget::ReasoningMarks;
pub(crate) use budget::bound;
pub use call_or_json::CallOrJson;
pub(crate) use call_or_json::Either;
pub use detected::DetectedFormat;

/// A piece of a reply.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Further text of the answer.
    Content(String),
    /// Further text of the reasoning before the answer.
    Reasoning(String),
    /// The start of a tool call. The call is valid only after `CallEnded`.
    ToolCall {
        /// The index of the call in the reply, from 0.
        index: usize,
        /// The call's id, unique in the conversation.
        id: String,
        /// Name of the called tool.
        name: String,
    },
    /// Further text of a call's arguments, as JSON.
    Arguments {
        /// Index of the call in the reply.
        index: usize,
        /// The text. Once the call has ended, all its texts together are a JSON object.
        json: String,
    },
    /// A call is complete.
    CallEnded {
        /// Index of the call in the reply.
        index: usize,
    },
    /// A call is malformed or truncated, so its arguments stay incomplete. The call's text follows
    /// as content.
    CallBroken {
        /// Index of the call in the reply.
        index: usize,
    },
}

/// Information about a request that a parser may need.
#[non_exhaustive]
#[derive(Debug, Clone, Default)]
pub struct ReplyRequest {
    /// The last characters of the prompt. They show whether the prompt has opened the reasoning.
    pub prompt_end: String,
    /// The tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether only the first call counts. The parser then ignores further calls.
    pub one_call: bool,
    /// Number of calls in the conversation so far.
    pub earlier_calls: usize,
}

/// A parser of one reply.
pub trait ReplyParser: Send {
    /// Processes a token, and returns the deltas that became final with it.
    fn feed(&mut self, token: &Token) -> Vec<Delta>;

    /// Processes the end of the reply, and returns the deltas that were withheld until then.
    fn finish(&mut self, stop: Option<&StopCause>) -> Vec<Delta>;
}

/// The format in which a model writes its replies.
pub trait ReplyFormat: Send + Sync {
    /// Whether the format can parse tool calls. If not, requests with tools are refused.
    fn reads_tools(&self) -> bool;

    /// Whether the format can separate reasoning from the answer. If not, requests for reasoning
    /// are refused.
    fn reads_reasoning(&self) -> bool;

    /// Prepares the conversation with `prepare`. If the chat template ignores tools, the format may
    /// first convert the tools to text.
    ///
    /// # Errors
    /// The error of `prepare`.
    fn written(
        &self,
        prompt: &ChatPrompt,
        prepare: &dyn Fn(&ChatPrompt) -> Result<PreparedPrompt>,
    ) -> Result<PreparedPrompt> {
        prepare(prompt)
    }

    /// Creates a parser of one reply.
    fn parser(&self, request: &ReplyRequest) -> Box<dyn ReplyParser>;

    /// The marks of reasoning in the reply to a request; `None` if reasoning cannot be limited.
    fn reasoning_marks(&self, request: &ReplyRequest) -> Option<ReasoningMarks> {
        let _ = request;
        None
    }

    /// A grammar for replies that call the tool `named`. With `None`, any tool of the request may
    /// be called.
    ///
    /// # Errors
    /// The reason why the format cannot force a call, in words for the client.
    fn forced_call(
        &self,
        request: &ReplyRequest,
        named: Option<&str>,
    ) -> std::result::Result<Grammar, String> {
        let _ = (request, named);
        Err(String::from("the model's format has no grammar of calls"))
    }

    /// A grammar for replies that either call a tool of the request or are JSON of `schema`.
    ///
    /// # Errors
    /// The reason why the format cannot express the choice, in words for the client.
    fn call_or_json(
        &self,
        request: &ReplyRequest,
        schema: &serde_json::Value,
    ) -> std::result::Result<CallOrJson, String> {
        let _ = (request, schema);
        Err(String::from("the model's format has no grammar of calls"))
    }
}

/// The format of models without calls and reasoning. The whole reply is the answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainText;

impl ReplyFormat for PlainText {
    fn reads_tools(&self) -> bool {
        false
    }

    fn reads_reasoning(&self) -> bool {
        false
    }

    fn parser(&self, _: &ReplyRequest) -> Box<dyn ReplyParser> {
        Box::new(PlainText)
    }
}

impl ReplyParser for PlainText {
    fn feed(&mut self, token: &Token) -> Vec<Delta> {
        match token.text.as_str() {
            "" => Vec::new(),
            text => vec![Delta::Content(text.to_owned())],
        }
    }

    fn finish(&mut self, _: Option<&StopCause>) -> Vec<Delta> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_is_passed_on_token_by_token() {
        let mut parser = PlainText.parser(&ReplyRequest::default());
        assert_eq!(
            parser.feed(&Token::new(1, "<think>")),
            [Delta::Content(String::from("<think>"))]
        );
        assert!(parser.feed(&Token::new(2, "")).is_empty());
        assert!(parser.finish(None).is_empty());
    }
}
