//! Orders of rank 0 in a served group: messages that make all ranks execute the same calls in the
//! same sequence. `lead.rs` sends orders, and `follow.rs` executes them.

use inference::{BatchEvent, EmbedOptions, GenerateOptions, RequestId};
use serde::{Deserialize, Serialize};

/// A call that all processes make. A model's number is its position on the command line. Sessions
/// are numbered in ascending sequence.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Starts session `session` of a model.
    Begin {
        /// The model.
        model: usize,
        /// The session's number.
        session: u64,
    },
    /// Adds a request.
    Add {
        /// The session.
        session: u64,
        /// The prompt.
        tokens: Vec<u32>,
        /// The options, without interrupts.
        options: Box<GenerateOptions>,
    },
    /// Removes a request.
    Remove {
        /// The session.
        session: u64,
        /// The request.
        row: RequestId,
    },
    /// Computes a step.
    Step {
        /// The session.
        session: u64,
        /// The value of [`Seen`] in rank 0 before the step.
        seen: u64,
    },
    /// Ends a session.
    End {
        /// The session.
        session: u64,
    },
    /// Embeds prompts.
    Embed {
        /// The model.
        model: usize,
        /// The prompts.
        prompts: Vec<Vec<u32>>,
        /// The options of embedding.
        options: EmbedOptions,
    },
    /// The server has ended.
    Stop,
}

/// A running hash of the events of a session's steps. If two processes have different hashes, they
/// no longer compute equal results.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Seen(u64);

impl Seen {
    /// Adds the events of a step.
    pub fn step<'a>(&mut self, events: impl IntoIterator<Item = &'a BatchEvent>) {
        for event in events {
            let (kind, token) = match event {
                BatchEvent::Token { token, .. } => (1, token.id),
                BatchEvent::Done { .. } => (2, 0),
                _ => (3, 0),
            };
            for word in [event.row().number(), kind, u64::from(token)] {
                // FNV-1a, applied to words.
                self.0 = (self.0 ^ word).wrapping_mul(0x100_0000_01b3);
            }
        }
    }

    /// The hash.
    pub fn word(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use inference::{Error, ErrorKind, Token};

    use super::*;

    #[test]
    fn orders_are_read_as_they_were_written() {
        let options = GenerateOptions::default()
            .with_temperature(0.7)
            .with_stop(vec![String::from("\n")])
            .with_seed(7);
        let order = Order::Add {
            session: 3,
            tokens: vec![1, 2],
            options: Box::new(options),
        };
        let text = serde_json::to_string(&order).unwrap();
        let read: Order = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }

    #[test]
    fn what_differs_is_seen() {
        let row = RequestId::new(1);
        let token = |id| BatchEvent::Token {
            row,
            token: Token::new(id, "a"),
        };
        let failed = BatchEvent::Failed {
            row,
            error: Error::new(ErrorKind::Engine, "a"),
        };
        let seen = |events: &[BatchEvent]| {
            let mut seen = Seen::default();
            seen.step(events);
            seen.word()
        };
        assert_eq!(seen(&[token(1), token(2)]), seen(&[token(1), token(2)]));
        assert_ne!(seen(&[token(1)]), seen(&[token(2)]));
        assert_ne!(seen(&[token(1)]), seen(&[failed]));
    }
}
