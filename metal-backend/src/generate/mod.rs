//! One request as an iterator: a prefill, then one token per step. `arch/` and `sample/` compute a
//! step, and `text/` converts ids to text.
//!
//! [`Request`] has the options and the result; [`SequenceState`] has the state of the computation.
//! [`Generation`] runs one request. [`Batch`] computes several requests in one forward pass;
//! `speculative.rs` and `batch/speculation.rs` compute several tokens of a request in one pass.

mod batch;
mod checkpoints;
mod draft;
mod metrics;
mod prefill;
mod prefix_sharing;
mod request;
mod sequence;
mod speculative;

pub use batch::Batch;
pub use request::{Request, salt};
pub use sequence::{Pending, SequenceState, draw_rows};

use std::sync::Arc;

use inference::{
    FinishReason, GenerateMetrics, GenerateOptions, Result, StopCause, Token, TokenSource,
};

use crate::cache::{self, Caches};
use crate::engine::Engine;
use crate::engine::forward::free_unused;
use crate::error::engine as engine_error;
use draft::Draft;
pub use draft::check_rewinds;
use sequence::read;
use speculative::SpeculativeDecoder;

/// The number of steps between two calls of [`free_unused`].
const CLEAR_EVERY: usize = 256;

/// One running request. Dropping it cancels the request and discards tokens computed ahead.
pub struct Generation {
    request: Request,
    /// `None` after the end, so that a closed model can free its weights.
    running: Option<Running>,
    steps: usize,
}

enum Running {
    /// One token per step.
    Plain(Box<SequenceState>),
    /// Several tokens per step, proposed by a drafter.
    Speculative(Box<SpeculativeDecoder>),
}

impl Generation {
    /// Validates and creates a request on `engine` for the token ids of a prompt.
    ///
    /// # Errors
    /// The errors of [`Request::new`] and [`SequenceState::new`].
    pub fn new(engine: Arc<Engine>, prompt: Vec<u32>, options: &GenerateOptions) -> Result<Self> {
        let mut request = Request::new(Arc::clone(&engine), prompt, options)?;
        let running = engine.scope(|| match Draft::new(&request)? {
            Some(draft) => SpeculativeDecoder::new(&mut request, draft)
                .map(|decoder| Running::Speculative(Box::new(decoder))),
            None => SequenceState::new(&mut request, engine.cache_options())
                .map(|sequence| Running::Plain(Box::new(sequence))),
        })?;
        Ok(Self {
            request,
            running: Some(running),
            steps: 0,
        })
    }

    /// Creates a request that continues `caches`, which were computed in `epoch` from unknown
    /// tokens. It uses no drafter, because drafting needs all earlier tokens.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn continuing(
        engine: Arc<Engine>,
        (caches, epoch): (Caches, u64),
        prompt: Vec<u32>,
        options: &GenerateOptions,
    ) -> Result<Self> {
        let before = cache::offset(&caches).unsigned_abs() as usize;
        let request = Request::after(before, Arc::clone(&engine), prompt, options)?;
        let sequence = engine.scope(|| SequenceState::continuing(&request, caches, epoch))?;
        Ok(Self {
            request,
            running: Some(Running::Plain(Box::new(sequence))),
            steps: 0,
        })
    }

    /// Runs one step, which finishes at least one token or ends the request.
    fn advance(&mut self) -> Result<()> {
        self.request.check()?;
        if !self.request.is_over() {
            let engine = Arc::clone(self.request.engine());
            engine.scope(|| self.step())?;
        }
        if self.request.is_over() {
            // Only a request that ended without an error stores its caches.
            match self.running.take() {
                Some(Running::Plain(sequence)) => sequence.keep(&self.request),
                Some(Running::Speculative(decoder)) => decoder.keep(&self.request),
                None => {}
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let request = &mut self.request;
        match self.running.as_mut() {
            None => return Ok(()),
            Some(Running::Speculative(decoder)) => decoder.step(request)?,
            Some(Running::Plain(sequence)) => {
                let pending = match sequence.next.take() {
                    Some(pending) => pending,
                    None => sequence.prefill(request)?,
                };
                // The next token is queued before this token is read, so that the device never
                // idles.
                let restart = sequence.must_restart();
                if request.remaining() > 1 && !restart {
                    sequence.next = Some(sequence.decode(&pending.token)?);
                }
                let read = read(&pending, request)?;
                read.check()?;
                request.accept(read);
                if restart && !request.is_over() {
                    sequence.restart(request);
                }
            }
        }
        self.steps += 1;
        if self.steps.is_multiple_of(CLEAR_EVERY) {
            free_unused().map_err(engine_error("decode"))?;
        }
        Ok(())
    }
}

impl Iterator for Generation {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.request.pop_unless_interrupted() {
                if token.is_err() {
                    self.running = None;
                }
                return Some(token);
            }
            if self.request.is_over() {
                return None;
            }
            if let Err(e) = self.advance() {
                self.running = None;
                self.request.fail(&e);
                return Some(Err(e));
            }
        }
    }
}

impl TokenSource for Generation {
    fn finish_reason(&self) -> Option<FinishReason> {
        self.request.finish_reason()
    }

    fn stop_cause(&self) -> Option<StopCause> {
        self.request.stop_cause()
    }

    fn metrics(&self) -> GenerateMetrics {
        self.request.metrics()
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.running = None;
        self.request.end(FinishReason::Cancelled);
    }
}
