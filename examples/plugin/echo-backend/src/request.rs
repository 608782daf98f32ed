//! One request: an iterator that generates one token per step. Text is withheld while a character
//! is incomplete or a stop string may follow.

use std::collections::VecDeque;
use std::sync::Arc;

use inference::kit::{Clock, Released, StopText, Utf8Decoder};
use inference::{FinishReason, GenerateMetrics, GenerateOptions, Result, Token, TokenSource};

use crate::counts::END;
use crate::model::{Shared, spell};
use crate::sampler::{Sampler, logprobs};

/// A running request. Dropping it ends the request.
pub struct Request {
    shared: Arc<Shared>,
    options: GenerateOptions,
    sampler: Sampler,
    /// Prompt and reply.
    ids: Vec<u32>,
    /// Number of tokens that may still be generated.
    left: usize,
    characters: Utf8Decoder,
    /// Tokens whose text may still change.
    text: StopText<Token>,
    /// Tokens that are ready to be returned.
    ready: VecDeque<Token>,
    finish: Option<FinishReason>,
    clock: Clock,
}

impl Request {
    /// A request that continues `prompt`. The caller has checked the prompt.
    pub fn new(shared: Arc<Shared>, prompt: Vec<u32>, options: GenerateOptions) -> Self {
        Self {
            sampler: Sampler::new(&options, prompt.len(), END),
            left: options.max_tokens,
            text: StopText::new(&options.stop.stop_strings),
            clock: Clock::start(prompt.len()),
            shared,
            options,
            ids: prompt,
            characters: Utf8Decoder::new(),
            ready: VecDeque::new(),
            finish: None,
        }
    }

    fn end(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            self.finish = Some(reason);
            self.clock.stop();
        }
    }

    /// Generates one token, or ends the reply.
    fn step(&mut self) -> Result<()> {
        self.options.check_interrupt()?;
        self.shared.check_open()?;
        if self.left == 0 {
            self.flush(FinishReason::Length);
            return Ok(());
        }
        self.left -= 1;
        let logits = self.shared.counts.logits(&self.ids);
        let id = self.sampler.take(&logits, &self.ids)?;
        self.clock.token();
        self.ids.push(id);
        let ends = id == END && !self.options.stop.ignore_eos;
        if ends || self.options.stop.stop_tokens.contains(&id) {
            self.flush(FinishReason::Stop);
            return Ok(());
        }
        let mut token = Token::new(id, "");
        if let Some(n) = self.options.output.logprobs {
            token = token.with_logprobs(logprobs(&logits, id, n, spell));
        }
        if self.options.output.logits {
            token = token.with_logits(logits);
        }
        let byte = u8::try_from(id).ok();
        let text = self.characters.push(byte.as_slice());
        let released = self.text.push(token, &text, self.characters.is_open());
        self.release(released);
        if self.left == 0 && self.finish.is_none() {
            self.flush(FinishReason::Length);
        }
        Ok(())
    }

    /// Queues tokens whose text is final. Ends the reply if a stop string was found.
    fn release(&mut self, released: Released<Token>) {
        for (mut token, text) in released.ready {
            token.text = text;
            self.ready.push_back(token);
        }
        if released.stopped.is_some() {
            self.end(FinishReason::Stop);
        }
    }

    /// Releases all withheld tokens, and ends the reply.
    fn flush(&mut self, reason: FinishReason) {
        let rest = self.characters.finish();
        let released = self.text.finish(&rest);
        self.release(released);
        self.end(reason);
    }
}

impl Iterator for Request {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                self.clock.counts().generated_tokens += 1;
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
        // The reply ends only when all its tokens were returned.
        self.finish.filter(|_| self.ready.is_empty())
    }

    fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
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
