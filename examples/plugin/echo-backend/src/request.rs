//! One request: an iterator that generates one token in each step. Text is held back while a
//! character is incomplete or a stop string may follow.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inference::{FinishReason, GenerateMetrics, GenerateOptions, Result, Token, TokenSource};

use crate::counts::END;
use crate::model::{Shared, spell};
use crate::sampler::{Sampler, logprobs};

/// A running request. Dropping it ends it.
pub struct Request {
    shared: Arc<Shared>,
    options: GenerateOptions,
    sampler: Sampler,
    /// Prompt and reply.
    ids: Vec<u32>,
    prompt_tokens: usize,
    /// The number of tokens that may still be generated.
    left: usize,
    /// Tokens whose text may still change.
    waiting: VecDeque<Token>,
    /// Tokens to return.
    ready: VecDeque<Token>,
    finish: Option<FinishReason>,
    handed_out: usize,
    started: Instant,
    first: Option<Duration>,
    last: Duration,
    total: Option<Duration>,
}

impl Request {
    /// A request to continue `prompt`, which the caller has checked.
    pub fn new(shared: Arc<Shared>, prompt: Vec<u32>, options: GenerateOptions) -> Self {
        Self {
            sampler: Sampler::new(&options, prompt.len(), END),
            left: options.max_tokens,
            shared,
            options,
            prompt_tokens: prompt.len(),
            ids: prompt,
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            finish: None,
            handed_out: 0,
            started: Instant::now(),
            first: None,
            last: Duration::ZERO,
            total: None,
        }
    }

    fn end(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            self.finish = Some(reason);
            self.total = Some(self.started.elapsed());
        }
    }

    /// Generates one token, or ends the reply.
    fn step(&mut self) -> Result<()> {
        self.options.check_interrupt()?;
        self.shared.check_open()?;
        if self.left == 0 {
            self.flush();
            self.end(FinishReason::Length);
            return Ok(());
        }
        self.left -= 1;
        let logits = self.shared.counts.logits(&self.ids);
        let id = self.sampler.take(&logits, &self.ids)?;
        self.last = self.started.elapsed();
        self.first.get_or_insert(self.last);
        self.ids.push(id);
        let ends = id == END && !self.options.stop.ignore_eos;
        if ends || self.options.stop.stop_tokens.contains(&id) {
            self.flush();
            self.end(FinishReason::Stop);
            return Ok(());
        }
        let mut token = Token::new(id, "");
        if let Some(n) = self.options.output.logprobs {
            token = token.with_logprobs(logprobs(&logits, id, n, spell));
        }
        if self.options.output.logits {
            token = token.with_logits(logits);
        }
        self.waiting.push_back(token);
        self.settle();
        if self.left == 0 && self.finish.is_none() {
            self.flush();
            self.end(FinishReason::Length);
        }
        Ok(())
    }

    /// The bytes of the tokens that are held back.
    fn bytes(&self) -> Vec<u8> {
        self.waiting
            .iter()
            .filter_map(|t| u8::try_from(t.id).ok())
            .collect()
    }

    /// Releases the tokens that no stop string can still remove.
    fn settle(&mut self) {
        let bytes = self.bytes();
        let stops = || self.options.stop.stop_strings.iter().map(String::as_bytes);
        let found = stops()
            .filter_map(|s| bytes.windows(s.len()).position(|w| w == s))
            .min();
        if let Some(at) = found {
            self.release(at);
            self.waiting.clear();
            self.end(FinishReason::Stop);
            return;
        }
        let begun = |s: &[u8]| {
            (1..s.len())
                .rev()
                .find(|&n| bytes.ends_with(&s[..n]))
                .unwrap_or(0)
        };
        let mut safe = bytes.len() - stops().map(begun).max().unwrap_or(0);
        if let Err(e) = std::str::from_utf8(&bytes[..safe])
            && e.error_len().is_none()
            && e.valid_up_to() + 4 > safe
        {
            safe = e.valid_up_to(); // a character of which more bytes may come
        }
        self.release(safe);
    }

    /// Releases all tokens that are held back.
    fn flush(&mut self) {
        self.release(self.waiting.len());
    }

    /// Releases the tokens of the first `n` bytes. A character's text comes with its last byte.
    fn release(&mut self, n: usize) {
        let bytes = self.bytes();
        let mut texts = VecDeque::new();
        for chunk in bytes[..n.min(bytes.len())].utf8_chunks() {
            for c in chunk.valid().chars() {
                texts.extend((1..c.len_utf8()).map(|_| String::new()));
                texts.push_back(String::from(c));
            }
            if !chunk.invalid().is_empty() {
                texts.extend((1..chunk.invalid().len()).map(|_| String::new()));
                texts.push_back(String::from('\u{fffd}'));
            }
        }
        loop {
            match self.waiting.front() {
                // The token has no text, so it is released with the token before it.
                Some(token) if token.id == END => {}
                Some(_) if !texts.is_empty() => {}
                _ => return,
            }
            let Some(mut token) = self.waiting.pop_front() else {
                return;
            };
            if token.id != END {
                token.text = texts.pop_front().unwrap_or_default();
            }
            self.ready.push_back(token);
        }
    }
}

impl Iterator for Request {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                self.handed_out += 1;
                return Some(Ok(token));
            }
            if self.finish.is_some() {
                self.shared.publish(self.metrics());
                return None;
            }
            if let Err(e) = self.step() {
                self.end(FinishReason::of_error(&e));
                self.shared.publish(self.metrics());
                return Some(Err(e));
            }
        }
    }
}

impl TokenSource for Request {
    fn finish_reason(&self) -> Option<FinishReason> {
        // The reply has not ended while tokens remain to be returned.
        self.finish.filter(|_| self.ready.is_empty())
    }

    fn metrics(&self) -> GenerateMetrics {
        let total = self.total.unwrap_or_else(|| self.started.elapsed());
        let first = self.first.unwrap_or(total);
        let mut m = GenerateMetrics::default();
        m.prompt_tokens = self.prompt_tokens;
        m.generated_tokens = self.handed_out;
        m.prefill_time = first;
        m.time_to_first_token = first;
        m.decode_time = self.last.saturating_sub(first);
        m.total_time = total;
        m
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.finish.is_none() {
            self.end(FinishReason::Cancelled);
            self.shared.publish(self.metrics());
        }
    }
}
