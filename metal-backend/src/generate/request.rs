//! The state of a request apart from its computation: prompt, options, generated text, finish
//! reason and metrics.

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

/// A sampled token and its results, copied to the host.
pub struct Read {
    /// The token's id.
    pub id: u32,
    /// The greatest logit of the token's step.
    pub greatest: f32,
    /// The token's number in the reply; the first token is 1.
    pub step: u64,
    /// The logits, if requested.
    pub logits: Option<Arc<[f32]>>,
    /// Log-probabilities, if requested.
    pub logprobs: Option<TokenLogprobs>,
}

impl Read {
    /// Returns an error if the token's logits had no finite maximum. Call it before
    /// [`Request::accept`].
    ///
    /// # Errors
    /// The errors of [`check_greatest`].
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
    /// Logits of the sampled tokens whose text is incomplete, oldest first.
    logits: VecDeque<Arc<[f32]>>,
    /// Log-probabilities of the same tokens.
    logprobs: VecDeque<TokenLogprobs>,
    /// All sampled tokens, including the token that ended the reply.
    drawn: Vec<u32>,
    produced: usize,
    finish: Option<FinishReason>,
    stop: Option<StopCause>,
    clock: Clock,
    /// A hash of the request's activation edits, if there are any.
    edits_key: Option<String>,
    /// The adapter that the request selects by name.
    adapter: Option<Arc<NamedAdapter>>,
}

/// Returns the salt of caches that were computed with these options, activation edits and named
/// adapter (by its hash). The first letter depends on the parts of the salt, so a client's salt
/// cannot equal the salt of edits or adapters.
pub fn salt(
    options: &PrefillOptions,
    edits_key: Option<&str>,
    adapter: Option<&str>,
) -> Option<String> {
    let salt = options.cache_salt.as_deref();
    let salt = match (edits_key, salt) {
        // The key has a fixed length, so different pairs of key and salt have different
        // concatenations.
        (Some(key), Some(salt)) => Some(format!("e{key}{salt}")),
        (Some(key), None) => Some(format!("n{key}")),
        (None, salt) => salt.map(|salt| format!("s{salt}")),
    };
    match adapter {
        // The hash has a fixed length, so the concatenation is unambiguous.
        Some(hash) => Some(format!("a{hash}{}", salt.unwrap_or_default())),
        None => salt,
    }
}

/// Returns a hash of a list of edits.
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
        // Options are validated only here. This must precede the clone, because cloning recurses
        // over a JSON schema, whose depth `validate` limits.
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

    /// Creates a request that continues caches of `before` unknown tokens. Options that read the
    /// prompt see only `prompt`.
    ///
    /// # Errors
    /// The errors of [`Request::new`].
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

    /// The engine that runs the request.
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

    /// Returns the prompt and the sampled tokens. The tokens in the caches are a prefix of them.
    pub fn tokens(&self) -> Vec<u32> {
        self.so_far().into_owned()
    }

    /// Returns the same as [`Self::tokens`], borrowed if no token is sampled yet.
    pub fn so_far(&self) -> Cow<'_, [u32]> {
        if self.drawn.is_empty() {
            Cow::Borrowed(&self.prompt)
        } else {
            Cow::Owned([self.prompt.as_slice(), &self.drawn].concat())
        }
    }

    /// Reports the progress of the prefill to the request's callback. A prefill after a restart is
    /// not reported.
    pub fn report(&self, done: usize) {
        if let (Some(progress), true) = (&self.options.prefill.progress, self.drawn.is_empty()) {
            progress.report(done, self.prompt.len());
        }
    }

    /// Returns the salt of the request's caches. It includes the edits and the adapter, because
    /// both change keys and values.
    pub fn salt(&self) -> Option<String> {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.hash());
        salt(&self.options.prefill, self.edits_key.as_deref(), adapter)
    }

    /// The adapter that the request selects by name.
    pub fn adapter(&self) -> Option<&Arc<NamedAdapter>> {
        self.adapter.as_ref()
    }

    /// Whether the request reuses and stores caches. False if its edits depend on its prompt,
    /// because then another prompt with the same prefix has other keys and values.
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

    /// Ends the request with an error if it was canceled, its deadline passed, or the model was
    /// closed. Ends a request for zero tokens without an error.
    ///
    /// # Errors
    /// The reason why the request ended.
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

    /// Returns the next token as [`Self::pop`], or the error that ended the request. After a
    /// cancellation, tokens that are ready are dropped.
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

    /// Removes and returns the next token whose text is complete.
    pub fn pop(&mut self) -> Option<Token> {
        self.ready.pop_front()
    }

    /// Returns why the request ended, once all tokens have been returned.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        if self.ready.is_empty() {
            self.finish
        } else {
            None
        }
    }

    /// Returns what stopped the reply, if [`Self::finish_reason`] is a stop.
    pub fn stop_cause(&self) -> Option<StopCause> {
        let stopped = self.finish_reason() == Some(FinishReason::Stop);
        self.stop.clone().filter(|_| stopped)
    }

    /// Returns the clock, for recording counts.
    pub fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// The metrics up to now.
    pub fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
    }

    /// Emits the text that the detokenizer still withholds, and ends the request.
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
