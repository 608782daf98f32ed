//! Converts ids to text, one token at a time, for streams.
//!
//! A character is never split. Spaces are the same as when the whole sequence is decoded at once.
//! Stop strings are found across token boundaries. The decode loop handles stop *tokens*, by id.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pieces::TextBuilder;
use super::tokenizer::Tokenizer;

/// The output of one step of a [`Detokenizer`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// Tokens with their text, which is final, beginning with the oldest. A text may be empty.
    pub ready: Vec<(u32, String)>,
    /// The stop string that was found. The released text ends before it.
    pub stopped: Option<String>,
}

/// Converts a stream of ids to text.
///
/// A token is held back until its text is final: it may contain an incomplete UTF-8 character, or
/// begin a stop string. The released texts, joined, equal [`Tokenizer::decode`] of all ids, cut
/// before the first complete stop string. Of several that end at one byte the longest counts. The
/// cost of a step is its own text times the number of stop strings.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<Matcher>,
    builder: TextBuilder,
    /// Tokens that are held back, each with the text that it completed.
    waiting: VecDeque<(u32, String)>,
    /// The length of the text of all held-back tokens, in bytes.
    waiting_bytes: usize,
    /// The number of newest tokens that belong to an incomplete character.
    open: usize,
    stopped: Option<String>,
}

impl Detokenizer {
    /// A stream that ends at any of the strings in `stop`. Empty strings are ignored.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &[String]) -> Self {
        let builder = TextBuilder::new(tokenizer.rule());
        Self {
            tokenizer,
            stops: stop
                .iter()
                .filter(|s| !s.is_empty())
                .map(|s| Matcher::new(s))
                .collect(),
            builder,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            open: 0,
            stopped: None,
        }
    }

    /// Keeps the space before the first token. Use it for text that continues a raw prompt, where
    /// the leading space of SentencePiece is part of the text.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.builder.keep_start();
        self
    }

    /// Takes the next id. After a stop string, it returns no text.
    pub fn push(&mut self, id: u32) -> Released {
        if self.stopped.is_some() {
            return self.over();
        }
        let text = self.tokenizer.feed(id, &mut self.builder);
        self.open = if self.builder.is_open() {
            self.open + 1
        } else {
            0
        };
        self.waiting.push_back((id, String::new()));
        self.append(&text)
    }

    /// Ends the stream. Returns the text that was held back, with U+FFFD for an incomplete
    /// character.
    pub fn finish(&mut self) -> Released {
        if self.stopped.is_some() {
            return self.over();
        }
        let text = self.builder.finish();
        let mut released = self.append(&text);
        if released.stopped.is_none() {
            released.ready.extend(self.waiting.drain(..));
            self.waiting_bytes = 0;
        }
        released
    }

    /// The stop string that ended the stream, if any.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    fn over(&self) -> Released {
        Released {
            ready: Vec::new(),
            stopped: self.stopped.clone(),
        }
    }

    /// Appends `text` to the newest held-back token, searches for stop strings, and returns final
    /// text.
    fn append(&mut self, text: &str) -> Released {
        let Some((_, last)) = self.waiting.back_mut() else {
            return Released::default();
        };
        last.push_str(text);
        let before = self.waiting_bytes;
        self.waiting_bytes += text.len();
        for (at, byte) in text.bytes().enumerate() {
            let mut longest: Option<&str> = None;
            for matcher in &mut self.stops {
                if matcher.step(byte) && longest.is_none_or(|f| f.len() < matcher.stop.len()) {
                    longest = Some(&matcher.stop);
                }
            }
            if let Some(stop) = longest {
                let stop = stop.to_owned();
                return self.stop_at((before + at + 1).saturating_sub(stop.len()), stop);
            }
        }
        let open_bytes = self.stops.iter().map(|m| m.matched).max().unwrap_or(0);
        let mut ready = Vec::new();
        while self.waiting.len() > self.open {
            match self.waiting.front() {
                Some((_, text)) if self.waiting_bytes - text.len() >= open_bytes => {
                    self.waiting_bytes -= text.len();
                }
                _ => break,
            }
            ready.extend(self.waiting.pop_front());
        }
        Released {
            ready,
            stopped: None,
        }
    }

    /// Returns the first `keep` bytes of the held-back text, drops the rest, and ends the stream.
    fn stop_at(&mut self, mut keep: usize, stop: String) -> Released {
        let mut ready = Vec::with_capacity(self.waiting.len());
        for (id, mut text) in self.waiting.drain(..) {
            text.truncate(keep);
            keep -= text.len();
            ready.push((id, text));
        }
        self.waiting_bytes = 0;
        self.stopped = Some(stop.clone());
        Released {
            ready,
            stopped: Some(stop),
        }
    }
}

/// Finds a stop string in a stream of bytes (Knuth, Morris, Pratt 1977). The state is the length of
/// the longest prefix of the stop string that the stream ends with.
#[derive(Debug, Clone)]
struct Matcher {
    stop: String,
    /// `fallback[n]`: the longest proper prefix of the first `n` bytes that is also their suffix.
    fallback: Vec<usize>,
    matched: usize,
}

impl Matcher {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut k = 0;
        for n in 1..bytes.len() {
            while k > 0 && bytes[n] != bytes[k] {
                k = fallback[k];
            }
            if bytes[n] == bytes[k] {
                k += 1;
            }
            fallback[n + 1] = k;
        }
        Self {
            stop: stop.to_owned(),
            fallback,
            matched: 0,
        }
    }

    /// Reads one byte; true if the stream now ends with the stop string.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.stop.as_bytes();
        while self.matched > 0 && bytes.get(self.matched) != Some(&byte) {
            self.matched = self.fallback[self.matched];
        }
        if bytes.get(self.matched) == Some(&byte) {
            self.matched += 1;
        }
        self.matched == bytes.len()
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
