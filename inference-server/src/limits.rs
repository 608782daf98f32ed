//! Limits on everything that a client can request.

use std::time::Duration;

use inference::{Error, ErrorKind, Result};

/// Limits on the requests of clients. Each time limit names the event at which it starts.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of a request's body in bytes.
    pub body_bytes: usize,
    /// Maximum memory of all bodies together, in bytes. A body's text and its parsed values count
    /// until the request ends.
    pub all_bodies_bytes: usize,
    /// The maximum depth of nested objects and arrays in a body.
    pub json_depth: usize,
    /// The maximum number of objects and arrays in a body.
    pub json_containers: usize,
    /// The maximum number of values in a body.
    pub json_values: usize,
    /// Maximum number of open connections. The operating system queues further connections.
    pub connections: usize,
    /// Time limit for a complete request header. The limit also closes idle connections.
    pub header_timeout: Duration,
    /// Time limit for a complete request body.
    pub body_timeout: Duration,
    /// Time limit for a client to read data that the server has written.
    pub write_timeout: Duration,
    /// Limit on the total time that one answer spends waiting for its client to read.
    pub answer_timeout: Duration,
    /// Time limit for a whole request, from its arrival.
    pub request_timeout: Duration,
    /// After this time the server sends a stream's header, even if the reply has no event yet.
    pub first_event: Duration,
    /// Interval of the comments that keep a silent stream open.
    pub ping: Duration,
    /// How long running replies may continue after a stop request.
    pub drain_timeout: Duration,
    /// A step of the engine that takes longer than this counts as stalled.
    pub stall: Duration,
    /// Number of tokens that a slow reader may leave unread before its reply is cancelled.
    pub buffered_tokens: usize,
    /// Maximum number of replies to one prompt (`n`).
    pub choices: usize,
    /// The maximum number of prompts of one request for completions.
    pub prompts: usize,
    /// Maximum size of a prompt's text in bytes, checked before tokenization.
    pub prompt_bytes: usize,
    /// The maximum number of tokens of a reply.
    pub reply_tokens: usize,
    /// The maximum number of messages of a conversation.
    pub messages: usize,
    /// The maximum number of tools of a request.
    pub tools: usize,
    /// The maximum size in bytes of all tools of a request, as JSON.
    pub tools_bytes: usize,
    /// Maximum number of tool calls of a message.
    pub tool_calls: usize,
    /// The maximum size in bytes of the variables that a request passes to the chat template, as
    /// JSON.
    pub template_bytes: usize,
    /// Maximum number of stop strings, and of stop tokens.
    pub stops: usize,
    /// The maximum length of a stop string in bytes.
    pub stop_bytes: usize,
    /// Maximum number of tokens with a logit bias.
    pub logit_bias: usize,
    /// The maximum number of alternatives in a token's log-probabilities.
    pub top_logprobs: usize,
    /// Maximum number of log-probabilities in an unstreamed answer, with alternatives.
    pub whole_logprobs: usize,
    /// The maximum size of a JSON schema in bytes.
    pub schema_bytes: usize,
    /// The maximum number of texts of a request for embeddings.
    pub embedding_inputs: usize,
    /// Longest keep-alive time that a request may set. The limit does not apply if the operator
    /// keeps models loaded forever.
    pub keep_alive: Duration,
    /// Interval between two answers to requests with wrong keys, over all clients.
    pub wrong_key_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            body_bytes: 8 << 20,
            all_bodies_bytes: 128 << 20,
            json_depth: 64,
            json_containers: 1 << 15,
            json_values: 1 << 19,
            connections: 512,
            header_timeout: seconds(10),
            body_timeout: seconds(30),
            write_timeout: seconds(30),
            answer_timeout: seconds(300),
            request_timeout: seconds(1800),
            first_event: seconds(5),
            ping: seconds(10),
            drain_timeout: seconds(20),
            stall: seconds(60),
            buffered_tokens: 512,
            choices: 8,
            prompts: 32,
            prompt_bytes: 4 << 20,
            reply_tokens: 131_072,
            messages: 4096,
            tools: 128,
            tools_bytes: 1 << 20,
            tool_calls: 128,
            template_bytes: 64 << 10,
            stops: 16,
            stop_bytes: 1024,
            logit_bias: 300,
            top_logprobs: 20,
            whole_logprobs: 1 << 18,
            schema_bytes: 64 << 10,
            embedding_inputs: 256,
            keep_alive: seconds(24 * 3600),
            wrong_key_pause: Duration::from_millis(100),
        }
    }
}

impl Limits {
    /// Checks that a server can work within these limits.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the name of the limit that is zero.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("body_bytes", self.body_bytes),
            ("json_depth", self.json_depth),
            ("json_containers", self.json_containers),
            ("json_values", self.json_values),
            ("connections", self.connections),
            ("buffered_tokens", self.buffered_tokens),
            ("choices", self.choices),
            ("prompts", self.prompts),
            ("prompt_bytes", self.prompt_bytes),
            ("reply_tokens", self.reply_tokens),
            ("messages", self.messages),
            ("whole_logprobs", self.whole_logprobs),
            ("embedding_inputs", self.embedding_inputs),
        ];
        let times = [
            ("header_timeout", self.header_timeout),
            ("body_timeout", self.body_timeout),
            ("write_timeout", self.write_timeout),
            ("answer_timeout", self.answer_timeout),
            ("request_timeout", self.request_timeout),
            ("ping", self.ping),
            ("stall", self.stall),
        ];
        if self.all_bodies_bytes < self.body_bytes {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the limit all_bodies_bytes is below body_bytes; it must hold at least one body",
            ));
        }
        let zero = counts
            .iter()
            .filter(|(_, n)| *n == 0)
            .map(|(name, _)| name)
            .chain(
                times
                    .iter()
                    .filter(|(_, t)| t.is_zero())
                    .map(|(name, _)| name),
            )
            .next();
        match zero {
            None => Ok(()),
            Some(name) => Err(Error::new(
                ErrorKind::InvalidOption,
                format!("the limit {name} is 0; it must be more"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_zeros_are_not() {
        Limits::default().validate().unwrap();
        let limits = Limits {
            connections: 0,
            ..Limits::default()
        };
        let error = limits.validate().unwrap_err();
        assert!(error.message().contains("connections"), "{error}");
    }
}
