//! Bounds on everything that a client can ask for.

use std::time::Duration;

use inference::{Error, ErrorKind, Result};

/// Bounds on what clients may request, send, and keep waiting.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all bodies that are read at a time.
    pub all_bodies_bytes: usize,
    /// Objects and arrays within each other in a body.
    pub json_depth: usize,
    /// Connections at a time; more wait to be accepted.
    pub connections: usize,
    /// Until a request's header is complete. An idle connection is closed after it, too.
    pub header_timeout: Duration,
    /// Until a request's body is complete.
    pub body_timeout: Duration,
    /// For which a client may leave written bytes unread.
    pub write_timeout: Duration,
    /// From the arrival of a request to its end.
    pub request_timeout: Duration,
    /// Until a stream's header is sent though nothing is known of the reply.
    pub first_event: Duration,
    /// Between comments that keep a silent stream open.
    pub ping: Duration,
    /// For which running replies go on after a stop was asked for.
    pub drain_timeout: Duration,
    /// After which a single step of the engine counts as stalled.
    pub stall: Duration,
    /// Tokens of a reply that the reader is behind before it is given up.
    pub buffered_tokens: usize,
    /// Replies to one prompt (`n`).
    pub choices: usize,
    /// Prompts of one request for completions.
    pub prompts: usize,
    /// Bytes of all text of a prompt, before it is tokenized.
    pub prompt_bytes: usize,
    /// Tokens of a reply.
    pub reply_tokens: usize,
    /// Messages of a conversation.
    pub messages: usize,
    /// Tools of a request.
    pub tools: usize,
    /// Stop strings, and stop tokens.
    pub stops: usize,
    /// Bytes of a stop string.
    pub stop_bytes: usize,
    /// Tokens with a logit bias.
    pub logit_bias: usize,
    /// Alternatives of a token's log-probability.
    pub top_logprobs: usize,
    /// Bytes of a JSON schema.
    pub schema_bytes: usize,
    /// Texts of a request for embeddings.
    pub embedding_inputs: usize,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            body_bytes: 8 << 20,
            all_bodies_bytes: 128 << 20,
            json_depth: 64,
            connections: 512,
            header_timeout: seconds(10),
            body_timeout: seconds(30),
            write_timeout: seconds(30),
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
            stops: 16,
            stop_bytes: 1024,
            logit_bias: 300,
            top_logprobs: 20,
            schema_bytes: 64 << 10,
            embedding_inputs: 256,
        }
    }
}

impl Limits {
    /// Checks that a server can work within them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the limit that is zero.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("body_bytes", self.body_bytes),
            ("json_depth", self.json_depth),
            ("connections", self.connections),
            ("buffered_tokens", self.buffered_tokens),
            ("choices", self.choices),
            ("prompts", self.prompts),
            ("prompt_bytes", self.prompt_bytes),
            ("reply_tokens", self.reply_tokens),
            ("messages", self.messages),
            ("embedding_inputs", self.embedding_inputs),
        ];
        let times = [
            ("header_timeout", self.header_timeout),
            ("body_timeout", self.body_timeout),
            ("write_timeout", self.write_timeout),
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

/// Whether JSON text has more than `most` objects and arrays within each other. It does not
/// recurse, and does not read values.
pub(crate) fn deeper_than(json: &[u8], most: usize) -> bool {
    let (mut depth, mut in_text, mut escaped) = (0usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b'{' | b'[' if !in_text => {
                depth += 1;
                if depth > most {
                    return true;
                }
            }
            b'}' | b']' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_counted_outside_of_texts() {
        assert!(!deeper_than(br#"{"a": [1, "[[[[{{{{", "\"[["]}"#, 2));
        assert!(deeper_than(br#"{"a": [[1]]}"#, 2));
        assert!(!deeper_than(br#"[{},{},[],[]]"#, 2));
        assert!(deeper_than("[".repeat(100_000).as_bytes(), 64));
    }

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
