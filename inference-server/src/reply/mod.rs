//! Splits the tokens of a reply into text, reasoning and tool calls. Families of models write these
//! in different formats. `detected` reads the formats that `inference-text` knows.

mod budget;
mod detected;
mod forced;

use inference::{ChatPrompt, Grammar, PreparedPrompt, Result, StopCause, Token, Tool};

pub use budget::ReasoningMarks;
pub(crate) use budget::bound;
pub use detected::DetectedFormat;

/// A piece of a reply.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// More of the answer.
    Content(String),
    /// More of the model's reasoning before its answer.
    Reasoning(String),
    /// The model begins to call a tool. The call counts once it has ended.
    ToolCall {
        /// The index of the call in the reply, from 0.
        index: usize,
        /// The call's id, unique in the conversation.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of the arguments of a call, as JSON text.
    Arguments {
        /// Which call of the reply.
        index: usize,
        /// The text. All texts of a call together are a JSON object once the call has ended.
        json: String,
    },
    /// A call is complete.
    CallEnded {
        /// Which call of the reply.
        index: usize,
    },
    /// A call is malformed or cut off, and its arguments stay incomplete. Its text follows as
    /// content.
    CallBroken {
        /// Which call of the reply.
        index: usize,
    },
}

/// Information about a request that a parser may need.
#[non_exhaustive]
#[derive(Debug, Clone, Default)]
pub struct ReplyRequest {
    /// The end of the prompt's text, which may have opened the reasoning.
    pub prompt_end: String,
    /// The tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether only the first call counts; the parser drops further ones.
    pub one_call: bool,
    /// The number of calls that the conversation already has.
    pub earlier_calls: usize,
}

/// Reads one reply.
pub trait ReplyParser: Send {
    /// Takes a token and returns the deltas that are final now.
    fn feed(&mut self, token: &Token) -> Vec<Delta>;

    /// Takes the end of the reply, and returns the deltas that were held back.
    fn finish(&mut self, stop: Option<&StopCause>) -> Vec<Delta>;
}

/// The format in which a model writes its replies.
pub trait ReplyFormat: Send + Sync {
    /// Whether tool calls can be found. Otherwise requests with tools are refused.
    fn reads_tools(&self) -> bool;

    /// Whether reasoning can be separated from the answer. Otherwise requests for it are refused.
    fn reads_reasoning(&self) -> bool;

    /// Prepares the conversation with `prepare`. If the template has no place for tools, they may
    /// become text.
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

    /// A parser of one reply.
    fn parser(&self, request: &ReplyRequest) -> Box<dyn ReplyParser>;

    /// The marks of reasoning in the reply to a request; `None` if reasoning cannot be cut.
    fn reasoning_marks(&self, request: &ReplyRequest) -> Option<ReasoningMarks> {
        let _ = request;
        None
    }

    /// A grammar of replies that call the tool `named`, or any tool of the request if it is `None`.
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
}

/// The format of models without calls and reasoning: the whole reply is its answer.
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
