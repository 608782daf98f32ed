//! The journey of one request: prefill, then one token a step, as an iterator. What a step computes
//! is in `arch/` and `sample/`; how text comes out of ids is in `text/`.

mod metrics;
pub mod prefill;

pub use metrics::Clock;

use std::collections::VecDeque;
use std::sync::Arc;

use inference::{
    ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Result, Token, TokenLogprobs,
    TokenSource,
};
use mlx_rs_core::{Array, async_eval, memory};

use crate::arch::Decoder;
use crate::cache::Caches;
use crate::error::engine as engine_error;
use crate::model::Engine;
use crate::nn::attention::Positions;
use crate::sample::{self, Drawn, Sampler};
use crate::text::{Detokenizer, Released};

/// Steps between returns of unused memory to the system.
const CLEAR_EVERY: usize = 256;

/// One running request. Dropping it cancels: whatever was computed ahead is thrown away.
pub struct Generation {
    engine: Arc<Engine>,
    /// `Some` while running; given up at the end so that a closed model can free its weights.
    running: Option<Running>,
    options: GenerateOptions,
    prompt: Vec<u32>,
    text: Detokenizer,
    ready: VecDeque<Token>,
    /// Logits of tokens whose text is still held back, oldest first.
    logits: VecDeque<Arc<[f32]>>,
    /// The same for log-probabilities.
    logprobs: VecDeque<TokenLogprobs>,
    produced: usize,
    limit: usize,
    finish: Option<FinishReason>,
    clock: Clock,
}

struct Running {
    decoder: Arc<dyn Decoder>,
    caches: Caches,
    sampler: Sampler,
    /// The token being computed and its logits `[1, vocab]`; `None` before prefill.
    next: Option<(Drawn, Array)>,
}

impl Generation {
    /// A request on `engine` for the prompt's ids, which are checked here.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for an empty prompt, ids outside the vocabulary or a prompt
    /// that leaves no room in the context; [`ErrorKind::Closed`] after the model was closed.
    pub fn new(engine: Arc<Engine>, prompt: Vec<u32>, options: GenerateOptions) -> Result<Self> {
        let clock = Clock::start(prompt.len());
        options.validate()?;
        engine.check_prompt(&prompt)?;
        let decoder = engine.decoder()?;
        // The last token generated need not fit: nothing is computed from it.
        let room = engine
            .context_limit()
            .saturating_sub(prompt.len())
            .saturating_add(1);
        let sampler = engine.sampler(&options, &prompt)?;
        let text = engine.detokenizer(&options.stop);
        Ok(Self {
            running: Some(Running {
                caches: decoder.new_caches(),
                decoder,
                sampler,
                next: None,
            }),
            limit: options.max_tokens.min(room),
            engine,
            options,
            prompt,
            text,
            ready: VecDeque::new(),
            logits: VecDeque::new(),
            logprobs: VecDeque::new(),
            produced: 0,
            finish: None,
            clock,
        })
    }

    /// Ends the request: gives up its memory and publishes its figures.
    fn end(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            self.finish = Some(reason);
            self.running = None;
            self.clock.stop();
            self.engine.publish(self.metrics());
        }
    }

    /// One step: at least one ready token, or the end.
    fn advance(&mut self) -> Result<()> {
        if let Err(e) = self.options.check_interrupt() {
            let reason = match e.kind() {
                ErrorKind::DeadlineExceeded => FinishReason::Deadline,
                _ => FinishReason::Cancelled,
            };
            self.end(reason);
            return Err(e);
        }
        self.engine.check_open()?;
        if self.limit == 0 {
            self.end(FinishReason::Length);
            return Ok(());
        }
        let engine_handle = Arc::clone(&self.engine);
        engine_handle.scope(|| self.step())
    }

    fn step(&mut self) -> Result<()> {
        let Some(running) = self.running.as_mut() else {
            return Ok(());
        };
        let (drawn, logits) = match running.next.take() {
            Some(pending) => pending,
            None => running.prefill(&self.prompt, &self.options)?,
        };
        // Start on the next token before this one is read, so that the device never waits.
        if self.produced + 1 < self.limit {
            running.next = Some(running.decode(&drawn.tokens)?);
        }
        let id: u32 = drawn.tokens.item().map_err(engine_error("decode"))?;
        self.clock.token();
        if self.options.logits {
            self.logits
                .push_back(logits.to_f32_vec().map_err(engine_error("logits"))?.into());
        }
        if let (Some(logprobs), Some(n)) = (&drawn.logprobs, self.options.logprobs) {
            let (chosen, top) = logprobs.row(0, n).map_err(engine_error("logprobs"))?;
            self.logprobs.push_back(self.engine.logprobs(chosen, top));
        }
        if (self.produced + 1).is_multiple_of(CLEAR_EVERY) {
            memory::clear_cache().map_err(engine_error("decode"))?;
        }

        let eos = !self.options.ignore_eos && self.engine.eos_tokens().contains(&id);
        if eos || self.options.stop_tokens.contains(&id) {
            self.flush(FinishReason::Stop);
            return Ok(());
        }
        self.produced += 1;
        self.clock.produced(self.produced);
        let released = self.text.push(id);
        let stopped = released.stopped.is_some();
        self.queue(released);
        if stopped {
            self.end(FinishReason::Stop);
        } else if self.produced >= self.limit {
            self.flush(FinishReason::Length);
        }
        Ok(())
    }

    /// Emits what the text decoder still holds back, and ends.
    fn flush(&mut self, reason: FinishReason) {
        let rest = self.text.finish();
        self.queue(rest);
        self.end(reason);
    }

    fn queue(&mut self, released: Released) {
        for (id, text) in released.ready {
            let mut token = Token::new(id, text);
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

impl Running {
    /// Queues the step that follows `token` and returns its token and logits, not yet computed.
    fn decode(&mut self, token: &Array) -> Result<(Drawn, Array)> {
        let logits = token
            .reshape(&[1, 1])
            .and_then(|ids| {
                self.decoder
                    .forward(&ids, &mut self.caches, Positions::Last)
            })
            .map_err(engine_error("decode"))?;
        self.draw(&logits)
    }

    /// Samples from logits `[1, 1, vocab]` and starts the computation. Caches are evaluated with
    /// it, so that no step keeps the graph of the steps before.
    fn draw(&mut self, logits: &Array) -> Result<(Drawn, Array)> {
        let logits = logits.squeeze_axis(1).map_err(engine_error("sampling"))?; // [1, 1, V] -> [1, V]
        let drawn = sample::sample(&mut [&mut self.sampler], &logits)?;
        let state = self.caches.iter().flat_map(|c| c.state());
        async_eval(
            drawn
                .arrays()
                .chain([&logits])
                .chain(self.sampler.state())
                .chain(state),
        )
        .map_err(engine_error("sampling"))?;
        Ok((drawn, logits))
    }
}

impl Iterator for Generation {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.ready.pop_front() {
                return Some(Ok(token));
            }
            if self.finish.is_some() {
                return None;
            }
            if let Err(e) = self.advance() {
                self.end(FinishReason::Error);
                return Some(Err(e));
            }
        }
    }
}

impl TokenSource for Generation {
    fn finish_reason(&self) -> Option<FinishReason> {
        // The reason holds once everything produced has been handed out.
        if self.ready.is_empty() {
            self.finish
        } else {
            None
        }
    }

    fn metrics(&self) -> GenerateMetrics {
        self.clock.metrics()
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.end(FinishReason::Cancelled);
    }
}
