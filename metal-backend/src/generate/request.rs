//! A request without its computation: prompt, options, generated text, reason for the end, and
//! metrics.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, PrefillOptions, Result,
    Steering, StopCause, Token, TokenLogprobs,
};
use inference_formats::hex;

use sha2::{Digest as _, Sha256};

use super::metrics::Clock;
use crate::adapter::NamedAdapter;
use crate::engine::Engine;
use crate::sample::check_greatest;
use crate::text::{Detokenizer, Released};

/// The values of a sampled token, read back to the host.
pub struct Read {
    /// The token's id.
    pub id: u32,
    /// The greatest logit of the token's step.
    pub greatest: f32,
    /// The token's number in the reply, from 1.
    pub step: u64,
    /// The logits, if requested.
    pub logits: Option<Arc<[f32]>>,
    /// Log-probabilities, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

impl Read {
    /// Refuses a token whose logits had no finite maximum. Call it before [`Request::accept`].
    ///
    /// # Errors
    /// As [`check_greatest`].
    pub fn check(&self) -> Result<()> {
        check_greatest(self.greatest, self.step)
    }
}

/// One request.
pub struct Request {
    engine: Arc<Engine>,
    options: GenerateOptions,
    prompt: Vec<u32>,
    text: Detokenizer,
    ready: VecDeque<Token>,
    /// Logits of the tokens that the detokenizer withholds, oldest first.
    logits: VecDeque<Arc<[f32]>>,
    /// Log-probabilities of these tokens.
    logprobs: VecDeque<TokenLogprobs>,
    /// All sampled tokens, including the token that ended the reply.
    drawn: Vec<u32>,
    produced: usize,
    finish: Option<FinishReason>,
    stop: Option<StopCause>,
    clock: Clock,
    /// A hash of the request's edits of activations, if there are any.
    edits_key: Option<String>,
    /// The adapter that the request names.
    adapter: Option<Arc<NamedAdapter>>,
}

/// The salt of caches that were computed with these options and edits, and with an adapter that the
/// request names, by its hash. The first letter tells the cases apart, so a client's salt cannot
/// equal the salt of edits or adapters.
pub fn salt(
    options: &PrefillOptions,
    edits_key: Option<&str>,
    adapter: Option<&str>,
) -> Option<String> {
    let salt = options.cache_salt.as_deref();
    let salt = match (edits_key, salt) {
        // The key has a fixed length, so no two pairs of key and salt have the same concatenation.
        (Some(key), Some(salt)) => Some(format!("e{key}{salt}")),
        (Some(key), None) => Some(format!("n{key}")),
        (None, salt) => salt.map(|salt| format!("s{salt}")),
    };
    match adapter {
        // The hash has a fixed length, too.
        Some(hash) => Some(format!("a{hash}{}", salt.unwrap_or_default())),
        None => salt,
    }
}

/// A hash of a list of edits.
fn key(steering: &Steering) -> Result<String> {
    let json = serde_json::to_vec(steering).map_err(|e| {
        let message = "the edits cannot be written as JSON";
        Error::new(ErrorKind::InvalidOption, message).with_source(e)
    })?;
    Ok(hex(&Sha256::digest(&json)))
}

impl Request {
    /// Validates and creates a request for the token ids of a prompt.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for invalid options, an empty prompt or ids outside the
    /// vocabulary.
    pub fn new(engine: Arc<Engine>, prompt: Vec<u32>, options: &GenerateOptions) -> Result<Self> {
        let clock = Clock::start(prompt.len());
        // Only here is a request validated. It runs before the clone, because the clone recurses
        // over a JSON schema.
        options.validate()?;
        engine.check_prompt(&prompt)?;
        let edits_key = options.steering.as_ref().map(key).transpose()?;
        let adapter = options.adapter.as_deref();
        let adapter = adapter.map(|name| engine.named_adapter(name)).transpose()?;
        Ok(Self {
            text: engine.detokenizer(&options.stop.stop_strings),
            engine,
            options: options.clone(),
            prompt,
            ready: VecDeque::new(),
            logits: VecDeque::new(),
            logprobs: VecDeque::new(),
            drawn: Vec::new(),
            produced: 0,
            finish: None,
            stop: None,
            clock,
            edits_key,
            adapter,
        })
    }

    /// A request that continues caches of `before` unknown tokens. Options that read the prompt
    /// read only `prompt`.
    ///
    /// # Errors
    /// As [`Request::new`].
    pub fn after(
        before: usize,
        engine: Arc<Engine>,
        prompt: Vec<u32>,
        options: &GenerateOptions,
    ) -> Result<Self> {
        let mut request = Self::new(engine, prompt, options)?;
        request.clock = Clock::start(before + request.prompt.len());
        request.clock.cached(before);
        Ok(request)
    }

    /// The engine that runs it.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The request's options.
    pub fn options(&self) -> &GenerateOptions {
        &self.options
    }

    /// The prompt's ids.
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Prompt and sampled tokens. The tokens of a cache are a prefix of these.
    pub fn tokens(&self) -> Vec<u32> {
        self.so_far().into_owned()
    }

    /// As [`Self::tokens`], borrowed if no token is sampled yet. A prefill computes these tokens.
    pub fn so_far(&self) -> Cow<'_, [u32]> {
        if self.drawn.is_empty() {
            Cow::Borrowed(&self.prompt)
        } else {
            Cow::Owned([self.prompt.as_slice(), &self.drawn].concat())
        }
    }

    /// Reports the progress of the prefill to the request's callback. A prefill that repeats the
    /// prompt together with tokens of the reply is not reported.
    pub fn report(&self, done: usize) {
        if let (Some(progress), true) = (&self.options.prefill.progress, self.drawn.is_empty()) {
            progress.report(done, self.prompt.len());
        }
    }

    /// The salt of the request's caches: the salt of the options, and the edits and the adapter,
    /// which change the keys.
    pub fn salt(&self) -> Option<String> {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.hash());
        salt(&self.options.prefill, self.edits_key.as_deref(), adapter)
    }

    /// The adapter that the request names.
    pub fn adapter(&self) -> Option<&Arc<NamedAdapter>> {
        self.adapter.as_ref()
    }

    /// Whether the request reuses and stores caches. It does not if its edits depend on its prompt.
    pub fn keeps_prompt(&self) -> bool {
        let steering = self.options.steering.as_ref();
        self.options.prefill.cache_prompt && !steering.is_some_and(Steering::depends_on_prompt)
    }

    /// The number of tokens that the request may still generate.
    pub fn remaining(&self) -> usize {
        self.options.max_tokens.saturating_sub(self.produced)
    }

    /// Whether the request ended.
    pub fn is_over(&self) -> bool {
        self.finish.is_some()
    }

    /// Checks whether to continue. A cancellation, the deadline, or closing the model ends the
    /// request with an error. A request for zero tokens ends without an error.
    ///
    /// # Errors
    /// The reason for the end.
    pub fn check(&mut self) -> Result<()> {
        let may = self
            .options
            .check_interrupt()
            .and_then(|()| self.engine.check_open());
        if let Err(e) = may {
            self.fail(&e);
            return Err(e);
        }
        if self.options.max_tokens == 0 {
            self.end(FinishReason::Length);
        }
        Ok(())
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, error: &inference::Error) {
        self.end(FinishReason::of_error(error));
    }

    /// Ends the request and publishes its metrics.
    pub fn end(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            self.finish = Some(reason);
            self.clock.stop();
            self.engine.publish(self.metrics());
        }
    }

    /// Adds the next token to the reply, and ends the request if the token is the last one.
    pub fn accept(&mut self, read: Read) {
        let Read {
            id,
            logits,
            logprobs,
            ..
        } = read;
        self.clock.token();
        self.drawn.push(id);
        if let Some(logits) = logits {
            self.logits.push_back(logits);
        }
        if let Some(logprobs) = logprobs {
            self.logprobs.push_back(logprobs);
        }
        let eos = !self.options.stop.ignore_eos && self.engine.eos_tokens().contains(&id);
        if eos || self.options.stop.stop_tokens.contains(&id) {
            self.stop = Some(if eos {
                StopCause::Eos(id)
            } else {
                StopCause::Token(id)
            });
            self.flush(FinishReason::Stop);
            return;
        }
        self.produced += 1;
        self.clock.produced(self.produced);
        let released = self.text.push(id);
        let stopped = released.stopped.clone();
        self.queue(released);
        if let Some(stop) = stopped {
            self.stop = Some(StopCause::String(stop));
            self.end(FinishReason::Stop);
        } else if self.remaining() == 0 {
            self.flush(FinishReason::Length);
        }
    }

    /// As [`Self::pop`], or the error that ended the request. After a cancellation, tokens with
    /// incomplete text are not returned.
    pub fn pop_unless_interrupted(&mut self) -> Option<Result<Token>> {
        if !self.ready.is_empty()
            && self.finish.is_none()
            && let Err(e) = self.check()
        {
            self.ready.clear();
            return Some(Err(e));
        }
        self.pop().map(Ok)
    }

    /// The next token whose text is complete.
    pub fn pop(&mut self) -> Option<Token> {
        self.ready.pop_front()
    }

    /// The reason for the end, once all tokens have been returned.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        if self.ready.is_empty() {
            self.finish
        } else {
            None
        }
    }

    /// The cause of the stop, if [`Self::finish_reason`] is a stop.
    pub fn stop_cause(&self) -> Option<StopCause> {
        let stopped = self.finish_reason() == Some(FinishReason::Stop);
        self.stop.clone().filter(|_| stopped)
    }

    /// The clock, to which others add their counts.
    pub fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// The metrics up to now.
    pub fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
    }

    /// Emits the detokenizer's pending text, and ends the request.
    fn flush(&mut self, reason: FinishReason) {
        let rest = self.text.finish();
        self.queue(rest);
        self.end(reason);
    }

    fn queue(&mut self, released: Released) {
        let engine = Arc::clone(&self.engine);
        let tokenizer = engine.text().tokenizer();
        for (id, text) in released.ready {
            let mut token = Token::new(id, text).with_special(tokenizer.is_special(id));
            if let Some(bytes) = tokenizer.token_bytes(id) {
                token = token.with_bytes(bytes);
            }
            if let Some(logits) = self.logits.pop_front() {
                token = token.with_logits(logits);
            }
            if let Some(logprobs) = self.logprobs.pop_front() {
                token = token.with_logprobs(logprobs);
            }
            self.ready.push_back(token);
        }
    }
}
