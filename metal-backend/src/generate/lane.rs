//! The computing side of one request: its caches, its sampler and the token that is on its way.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, async_eval};

use super::prefix::Prefixes;
use super::request::Request;
use crate::arch::{Decoder, Watch};
use crate::cache::{self, CacheOptions, Caches, Row};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::sample::{Logprobs, Sampler, sample};

/// A token on its way.
#[derive(Clone)]
pub struct Pending {
    /// Its id, `uint32 [1]`.
    pub token: Array,
    /// The logits it is drawn from, `[1, vocab]`.
    pub logits: Array,
    /// Log-probabilities of a step, and which row of them is this one's.
    pub logprobs: Option<(Arc<Logprobs>, i32)>,
}

impl Pending {
    /// The arrays to evaluate.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let logprobs = self.logprobs.iter().flat_map(|(l, _)| l.arrays());
        [&self.token, &self.logits].into_iter().chain(logprobs)
    }
}

/// Draws a token for each row of `logits` `[B, vocab]` by the sampler of that row.
///
/// # Errors
/// What a grammar or a logits processor says, or when memory runs out.
pub fn draw_rows(samplers: &mut [&mut Sampler], logits: &Array) -> Result<Vec<Pending>> {
    let drawn = sample(samplers, logits)?;
    let logprobs = drawn.logprobs.map(Arc::new);
    (0i32..)
        .zip(samplers.iter())
        .map(|(row, sampler)| {
            let own = |a: &Array| match samplers.len() {
                1 => Ok(a.clone()),
                _ => a.slice_axis(0, row, row + 1).map_err(engine("sampling")),
            };
            Ok(Pending {
                token: own(&drawn.tokens)?,
                logits: own(logits)?,
                logprobs: logprobs
                    .as_ref()
                    .filter(|_| sampler.logprobs().is_some())
                    .map(|l| (Arc::clone(l), row)),
            })
        })
        .collect()
}

/// Where a request is computed.
pub struct Lane {
    /// The network, held so that closing the model does not take it away within a step.
    pub decoder: Arc<dyn Decoder>,
    /// Keys and values of everything fed so far.
    pub caches: Caches,
    /// The request's own chain.
    pub sampler: Sampler,
    /// The next token; `None` before the prompt was run.
    pub next: Option<Pending>,
    /// Prompt tokens that the caches hold.
    pub fed: usize,
    /// [`crate::model::Engine::adaptations`] when it began.
    pub adaptations: u64,
}

impl Lane {
    /// A lane for `request`, with the longest prefix of its prompt that the engine remembers in caches
    /// that `options` describe.
    ///
    /// # Errors
    /// When the model is closed, or the sampler cannot be made.
    pub fn new(request: &mut Request, options: &CacheOptions) -> Result<Self> {
        let model = Arc::clone(request.engine());
        let decoder = model.decoder()?;
        let sampler = model.sampler(request.options(), request.prompt())?;
        let adaptations = model.adaptations();
        let (caches, fed) = prepared(decoder.as_ref(), options, model.prefixes(), request);
        request.clock().cached(fed);
        Ok(Self {
            decoder,
            caches,
            sampler,
            next: None,
            fed,
            adaptations,
        })
    }

    /// Queues the step that follows `token` and returns its token and logits, not yet computed.
    ///
    /// # Errors
    /// As [`Self::draw`].
    pub fn decode(&mut self, token: &Array) -> Result<Pending> {
        let logits = token
            .reshape(&[1, 1])
            .and_then(|ids| {
                let mut rows = [Row {
                    length: 1,
                    caches: &mut self.caches,
                }];
                let watch = &mut Watch::nothing();
                self.decoder
                    .forward(&ids, &mut rows, Positions::Last, watch)
            })
            .map_err(engine("decode"))?;
        self.draw(&logits)
    }

    /// Samples from logits `[1, 1, vocab]` and starts the computation. Caches are evaluated with
    /// it, so that no step keeps the graph of the steps before.
    ///
    /// # Errors
    /// What a grammar or a logits processor says, or when memory runs out.
    pub fn draw(&mut self, logits: &Array) -> Result<Pending> {
        let logits = logits.squeeze_axis(1).map_err(engine("sampling"))?; // [1, 1, V] -> [1, V]
        let pending = draw_rows(&mut [&mut self.sampler], &logits)?
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))?;
        async_eval(
            pending
                .arrays()
                .chain(self.sampler.state())
                .chain(self.caches.iter().flat_map(|c| c.state())),
        )
        .map_err(engine("sampling"))?;
        Ok(pending)
    }

    /// Gives the caches to the engine, for a later prompt that begins as this request did.
    pub fn keep(self, request: &Request) {
        if request.options().cache_prompt {
            let mut tokens = request.tokens();
            tokens.truncate(cache::offset(&self.caches).unsigned_abs() as usize);
            request.engine().prefixes().put(tokens, self.caches);
        }
    }
}

/// Caches for `request`, and how much of its prompt they hold already: those of `prefixes` where they
/// may be used, else empty ones.
pub fn prepared(
    decoder: &dyn Decoder,
    options: &CacheOptions,
    prefixes: &Prefixes,
    request: &Request,
) -> (Caches, usize) {
    let empty = decoder.new_caches(options);
    let reused = if request.options().cache_prompt {
        prefixes.take(request.prompt(), &empty)
    } else {
        None
    };
    let (mut caches, fed) = reused.unwrap_or((empty, 0));
    let all = request
        .prompt()
        .len()
        .saturating_add(request.options().max_tokens);
    let all = i32::try_from(all).unwrap_or(i32::MAX);
    caches.iter_mut().for_each(|cache| cache.expect(all));
    (caches, fed)
}
