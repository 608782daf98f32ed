//! Ids to text, one token at a time: what `generate` streams.
//!
//! A character is never split, spaces come out exactly as when the whole sequence is decoded at once, and
//! stop strings are found across token borders. Not here: stop *tokens*, which the decode loop knows by id.

use std::collections::VecDeque;
use std::sync::Arc;

use super::tokenizer::Tokenizer;

/// What one step of a [`Detokenizer`] released.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// Tokens whose text is final, oldest first, with that text (which may be empty).
    pub ready: Vec<(u32, String)>,
    /// The stop string that was found. Its text, and all after it, is left out.
    pub stopped: Option<String>,
}

/// Turns a stream of ids into text.
///
/// Tokens wait inside while their text is not final: an incomplete UTF-8 character, or the possible
/// beginning of a stop string. The released texts, put together, equal [`Tokenizer::decode`] of all ids,
/// cut before the stop string that is complete first (of several that end at one place: the longest).
/// Each step costs in the order of its own text plus the longest stop string, whatever came before.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    stop: Vec<String>,
    longest_stop: usize,
    strip: Option<(char, usize)>,
    any_token: bool,
    /// Bytes of a character that is not complete yet: at most three.
    partial: Vec<u8>,
    /// Tokens not released, each with the text that became complete when it arrived.
    waiting: VecDeque<(u32, String)>,
    /// The last bytes of the text, among them everything that could begin a stop string.
    tail: String,
    /// How many bytes at the end of `tail` belong to waiting tokens.
    waiting_bytes: usize,
    stopped: Option<String>,
}

impl Detokenizer {
    /// A stream that ends at any of `stop` (empty strings among them are ignored).
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &[String]) -> Self {
        let stop: Vec<String> = stop.iter().filter(|s| !s.is_empty()).cloned().collect();
        let longest_stop = stop.iter().map(String::len).max().unwrap_or(0);
        let strip = tokenizer.rule().strip();
        Self {
            tokenizer,
            stop,
            longest_stop,
            strip,
            any_token: false,
            partial: Vec::new(),
            waiting: VecDeque::new(),
            tail: String::new(),
            waiting_bytes: 0,
            stopped: None,
        }
    }

    /// Keeps the space in front of the first token: for text that continues a raw prompt, where
    /// SentencePiece's leading space is a real one.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.strip = None;
        self.any_token = true;
        self
    }

    /// Takes the next id. After a stop string was found nothing more is released.
    pub fn push(&mut self, id: u32) -> Released {
        if let Some(stop) = &self.stopped {
            return Released { ready: Vec::new(), stopped: Some(stop.clone()) };
        }
        let text = match self.tokenizer.piece(id, !self.any_token) {
            Some(bytes) => {
                self.any_token = true;
                self.complete(&bytes)
            }
            None => String::new(),
        };
        self.waiting.push_back((id, String::new()));
        self.append(&text);
        self.release(false)
    }

    /// Ends the stream: releases what waits, an incomplete character as U+FFFD on the last token.
    pub fn finish(&mut self) -> Released {
        if let Some(stop) = &self.stopped {
            return Released { ready: Vec::new(), stopped: Some(stop.clone()) };
        }
        if !self.partial.is_empty() {
            self.partial.clear();
            self.append("\u{FFFD}");
        }
        self.release(true)
    }

    /// The stop string that ended the stream, if one did.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    /// Decodes what is complete of the pending bytes and the new ones; the rest stays pending.
    fn complete(&mut self, bytes: &[u8]) -> String {
        let all;
        let mut rest = if self.partial.is_empty() {
            bytes
        } else {
            self.partial.extend_from_slice(bytes);
            all = std::mem::take(&mut self.partial);
            &all[..]
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(invalid) = error.error_len() else {
                        self.partial = after.to_vec();
                        break;
                    };
                    text.push('\u{FFFD}');
                    rest = &after[invalid..];
                }
            }
        }
        self.strip_start(text)
    }

    fn strip_start(&mut self, text: String) -> String {
        let Some((what, limit)) = self.strip else { return text };
        if text.is_empty() {
            return text;
        }
        let n = text.chars().take(limit).take_while(|c| *c == what).count();
        // Every character went and more may follow: go on with the next token.
        let all = n == text.chars().count();
        self.strip = (all && n < limit).then(|| (what, limit - n));
        text.chars().skip(n).collect()
    }

    /// Gives `text` to the newest waiting token and to the window.
    fn append(&mut self, text: &str) {
        if let Some((_, last)) = self.waiting.back_mut() {
            last.push_str(text);
            self.tail.push_str(text);
            self.waiting_bytes += text.len();
        }
    }

    fn release(&mut self, end: bool) -> Released {
        if let Some((start, stop)) = self.find_stop() {
            return self.stop_at(start, stop);
        }
        let held = if end { 0 } else { self.held() };
        let mut ready = Vec::new();
        // A token waits if any byte of it may belong to a stop string, or bytes of a character are open:
        // then the newest token, and empty ones behind a waiting one, stay to keep the order.
        while let Some((_, text)) = self.waiting.front() {
            let open = !self.partial.is_empty() && self.waiting.len() == 1;
            let is_held = self.waiting_bytes - text.len() < held || (held > 0 && self.waiting_bytes <= held);
            if !end && (open || is_held) {
                break;
            }
            self.waiting_bytes -= text.len();
            ready.extend(self.waiting.pop_front());
        }
        self.forget();
        Released { ready, stopped: None }
    }

    /// Where the first complete stop string begins in `tail`.
    fn find_stop(&self) -> Option<(usize, String)> {
        self.stop
            .iter()
            .filter_map(|stop| self.tail.find(stop.as_str()).map(|at| (at + stop.len(), at, stop)))
            .min()
            .map(|(_, at, stop)| (at, stop.clone()))
    }

    /// How many bytes at the end of `tail` could begin a stop string.
    fn held(&self) -> usize {
        let most = self.longest_stop.saturating_sub(1).min(self.tail.len());
        (1..=most)
            .rev()
            .filter(|n| self.tail.is_char_boundary(self.tail.len() - n))
            .find(|n| {
                let end = &self.tail[self.tail.len() - n..];
                self.stop.iter().any(|stop| stop.len() > *n && stop.starts_with(end))
            })
            .unwrap_or(0)
    }

    fn stop_at(&mut self, start: usize, stop: String) -> Released {
        // Everything before `start` and not yet released belongs to the oldest waiting tokens.
        let mut keep = (start + self.waiting_bytes).saturating_sub(self.tail.len());
        let mut ready = Vec::with_capacity(self.waiting.len());
        for (id, mut text) in self.waiting.drain(..) {
            text.truncate(keep);
            keep -= text.len();
            ready.push((id, text));
        }
        self.partial.clear();
        self.tail.clear();
        self.waiting_bytes = 0;
        self.stopped = Some(stop.clone());
        Released { ready, stopped: Some(stop) }
    }

    /// Drops from the window what no stop string can reach any more.
    fn forget(&mut self) {
        let keep = self.longest_stop.saturating_sub(1).max(self.waiting_bytes);
        let mut cut = self.tail.len().saturating_sub(keep);
        while !self.tail.is_char_boundary(cut) {
            cut -= 1;
        }
        self.tail.drain(..cut);
    }
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
