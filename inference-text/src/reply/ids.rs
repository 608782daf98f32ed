//! Generates ids for tool calls, unless the model itself writes an id.

use std::hash::{BuildHasher, RandomState};

/// The form of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdStyle {
    /// `call_` and 24 alphanumerics, as OpenAI's API writes them.
    Call,
    /// 9 alphanumerics, the only form that Mistral's templates accept.
    Nine,
}

/// Generates ids for calls of families that do not write any.
pub trait IdGenerator: Send {
    /// A new id, different from all ids before it.
    fn next_id(&mut self, style: IdStyle) -> String;
}

impl<F: FnMut(IdStyle) -> String + Send> IdGenerator for F {
    fn next_id(&mut self, style: IdStyle) -> String {
        self(style)
    }
}

/// Random ids. They are unique in practice, but not secret.
#[derive(Clone, Debug)]
pub struct RandomIds {
    state: RandomState,
    count: u64,
}

impl RandomIds {
    /// A generator with a random seed.
    pub fn new() -> Self {
        Self {
            state: RandomState::new(),
            count: 0,
        }
    }
}

impl Default for RandomIds {
    fn default() -> Self {
        Self::new()
    }
}

impl IdGenerator for RandomIds {
    fn next_id(&mut self, style: IdStyle) -> String {
        const ALPHABET: &[u8; 62] =
            b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let (mut id, length) = match style {
            IdStyle::Call => (String::from("call_"), 24),
            IdStyle::Nine => (String::new(), 9),
        };
        // One hash provides at most ten digits, because 62^10 is less than 2^64.
        for block in 0..3 {
            let mut bits = self.state.hash_one((self.count, block));
            for _ in 0..10.min(length - block * 10) {
                id.push(char::from(ALPHABET[(bits % 62) as usize]));
                bits /= 62;
            }
            if (block + 1) * 10 >= length {
                break;
            }
        }
        self.count += 1;
        id
    }
}

/// Consecutive ids for tests and golden files: `call_0`, `call_1`, … or `000000000`, `000000001`,
/// ….
#[derive(Clone, Copy, Debug, Default)]
pub struct SequentialIds {
    count: u64,
}

impl IdGenerator for SequentialIds {
    fn next_id(&mut self, style: IdStyle) -> String {
        let count = self.count;
        self.count += 1;
        match style {
            IdStyle::Call => format!("call_{count}"),
            IdStyle::Nine => format!("{count:09}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_have_their_form_and_differ() {
        let mut ids = RandomIds::new();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            let nine = ids.next_id(IdStyle::Nine);
            assert_eq!(nine.len(), 9);
            assert!(nine.bytes().all(|b| b.is_ascii_alphanumeric()), "{nine}");
            let call = ids.next_id(IdStyle::Call);
            assert_eq!(call.len(), 29);
            assert!(
                call["call_".len()..]
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric()),
                "{call}"
            );
            assert!(seen.insert(nine) && seen.insert(call));
        }
    }
}
