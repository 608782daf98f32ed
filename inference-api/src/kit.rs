//! Parts that most backends need: [`StopText`] cuts stop strings from a stream, [`Utf8Decoder`]
//! assembles whole characters from bytes, [`Clock`] measures a request, and [`panic_text`] returns
//! the message of a caught panic. No part needs a tokenizer or an engine.

use std::any::Any;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::metrics::GenerateMetrics;

/// The output of one step of a [`StopText`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released<T> {
    /// Tokens with their final text, oldest first. A text may be empty.
    pub ready: Vec<(T, String)>,
    /// The stop string that was found. The released text ends before it.
    pub stopped: Option<String>,
}

impl<T> Default for Released<T> {
    fn default() -> Self {
        Self {
            ready: Vec::new(),
            stopped: None,
        }
    }
}

/// Cuts stop strings from streamed text.
///
/// A token is withheld while its text is incomplete or may be the start of a stop string. The
/// released texts, joined, are the text of all tokens up to the first complete stop string. If
/// several stop strings end at the same byte, the longest is reported. The cost of a step is
/// proportional to the length of its new text times the number of stop strings.
///
/// `T` is the data that the backend attaches to a token, such as its id.
#[derive(Debug, Clone)]
pub struct StopText<T> {
    stops: Vec<Matcher>,
    /// Withheld tokens, each with the text that it completed.
    waiting: VecDeque<(T, String)>,
    /// Length of the text of all withheld tokens, in bytes.
    waiting_bytes: usize,
    /// Number of newest tokens that belong to an incomplete character.
    open: usize,
    stopped: Option<String>,
}

impl<T> StopText<T> {
    /// A stream that ends at any string in `stops`. Empty strings are ignored.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops
                .iter()
                .filter(|s| !s.is_empty())
                .map(|s| Matcher::new(s))
                .collect(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            open: 0,
            stopped: None,
        }
    }

    /// Adds the next token. `pending` is whether a later token completes its text. After a stop
    /// string was found, no text is returned.
    pub fn push(&mut self, token: T, text: &str, pending: bool) -> Released<T> {
        if self.stopped.is_some() {
            return self.over();
        }
        self.open = if pending { self.open + 1 } else { 0 };
        self.waiting.push_back((token, String::new()));
        self.append(text)
    }

    /// Ends the stream. Appends `rest` to the last withheld token, and releases all tokens.
    pub fn finish(&mut self, rest: &str) -> Released<T> {
        if self.stopped.is_some() {
            return self.over();
        }
        let mut released = self.append(rest);
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

    fn over(&self) -> Released<T> {
        Released {
            ready: Vec::new(),
            stopped: self.stopped.clone(),
        }
    }

    /// Appends `text` to the newest withheld token, searches for stop strings, and returns text
    /// that is now final.
    fn append(&mut self, text: &str) -> Released<T> {
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

    /// Returns the first `keep` bytes of the withheld text, drops the rest, and ends the stream.
    fn stop_at(&mut self, mut keep: usize, stop: String) -> Released<T> {
        let mut ready = Vec::with_capacity(self.waiting.len());
        for (token, mut text) in self.waiting.drain(..) {
            text.truncate(keep);
            keep -= text.len();
            ready.push((token, text));
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
/// the longest prefix of the stop string that is also a suffix of the stream.
#[derive(Debug, Clone)]
struct Matcher {
    stop: String,
    /// `fallback[n]` is the length of the longest proper prefix of the first `n` bytes that is also
    /// their suffix.
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

    /// Reads one byte. Returns true if the stream now ends with the stop string.
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

/// Converts the bytes of tokens to whole characters.
///
/// Each maximal invalid part becomes one U+FFFD, so that the joined texts equal
/// [`String::from_utf8_lossy`] of all bytes.
#[derive(Debug, Clone, Default)]
pub struct Utf8Decoder {
    /// Bytes of an incomplete character: at most three.
    partial: Vec<u8>,
}

impl Utf8Decoder {
    /// A decoder at the start of a text.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a character is incomplete.
    #[must_use]
    pub fn is_open(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Adds the bytes of one token and returns the text that is now complete.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.partial.extend_from_slice(bytes);
        let all = std::mem::take(&mut self.partial);
        let mut text = String::with_capacity(all.len());
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && is_incomplete(invalid) {
                self.partial = invalid.to_vec();
            } else if !invalid.is_empty() {
                text.push('\u{FFFD}');
            }
        }
        text
    }

    /// Ends the text. Returns U+FFFD if a character is incomplete, else an empty string.
    pub fn finish(&mut self) -> String {
        let open = self.is_open();
        self.partial.clear();
        String::from(if open { "\u{FFFD}" } else { "" })
    }
}

/// Whether further bytes could complete `invalid`, the end of a text, to a valid character.
fn is_incomplete(invalid: &[u8]) -> bool {
    std::str::from_utf8(invalid).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

/// Measures the times of one request, from the call to its end.
#[derive(Debug, Clone)]
pub struct Clock {
    /// Time of the call. All fields below are relative to it.
    asked: Instant,
    /// Time at which the request left the queue.
    begun: Option<Duration>,
    first: Option<Duration>,
    last: Duration,
    end: Option<Duration>,
    counts: GenerateMetrics,
}

impl Clock {
    /// Starts the clock of a request that waits in a queue. The prefill starts at [`Clock::begin`].
    #[must_use]
    pub fn queued() -> Self {
        Self {
            asked: Instant::now(),
            begun: None,
            first: None,
            last: Duration::ZERO,
            end: None,
            counts: GenerateMetrics::default(),
        }
    }

    /// Starts the clock of a request that runs immediately. `prompt_tokens` is the length of its
    /// prompt.
    #[must_use]
    pub fn start(prompt_tokens: usize) -> Self {
        let mut clock = Self::queued();
        clock.begun = Some(Duration::ZERO);
        clock.counts.prompt_tokens = prompt_tokens;
        clock
    }

    /// Records that the request has left the queue.
    pub fn begin(&mut self) {
        let now = self.asked.elapsed();
        self.begun.get_or_insert(now);
    }

    /// Records that a token was computed. The first token ends the prefill. The token is not
    /// counted, because a token that ends a reply is not a part of the reply.
    pub fn token(&mut self) {
        let now = self.asked.elapsed();
        self.first.get_or_insert(now);
        self.last = now;
    }

    /// The request's counts of tokens and bytes, which [`Clock::metrics`] returns unchanged. Times
    /// set here have no effect.
    pub fn counts(&mut self) -> &mut GenerateMetrics {
        &mut self.counts
    }

    /// Stops the clock. Returns false if it was stopped before.
    pub fn stop(&mut self) -> bool {
        let running = self.end.is_none();
        let now = self.asked.elapsed();
        self.end.get_or_insert(now);
        running
    }

    /// The metrics up to now or, after [`Clock::stop`], up to the end.
    #[must_use]
    pub fn metrics(&self) -> GenerateMetrics {
        let total = self.end.unwrap_or_else(|| self.asked.elapsed());
        let first = self.first.unwrap_or(total);
        GenerateMetrics {
            prefill_time: self
                .begun
                .map_or(Duration::ZERO, |begun| first.saturating_sub(begun)),
            decode_time: self.last.saturating_sub(first),
            total_time: total,
            time_to_first_token: first,
            ..self.counts.clone()
        }
    }
}

/// The message of a caught panic, if it has one.
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("no {}", "driver")).unwrap_err();
/// assert_eq!(inference::kit::panic_text(panic.as_ref()), Some("no driver"));
/// ```
#[must_use]
pub fn panic_text(panic: &(dyn Any + Send)) -> Option<&str> {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

#[cfg(test)]
#[path = "kit_tests.rs"]
mod tests;
