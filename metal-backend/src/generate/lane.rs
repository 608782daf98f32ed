//! The computing side of one request: its caches, its sampler and the token that is on its way.

use std::sync::Arc;

use inference::Result;
use mlx_rs_core::{Array, async_eval};

use super::request::Request;
use crate::arch::{Decoder, Watch};
use crate::cache::{self, Caches, Row};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::sample::Sampler;

/// A token on its way: its id, `uint32 [1]`, and the logits it is drawn from, `[1, vocab]`.
pub type Pending = (Array, Array);

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
}

impl Lane {
    /// A lane for `request`, with the longest prefix of its prompt that the engine remembers.
    ///
    /// # Errors
    /// When the model is closed, or the sampler cannot be made.
    pub fn new(request: &mut Request) -> Result<Self> {
        let model = Arc::clone(request.engine());
        let decoder = model.decoder()?;
        let sampler =
            Sampler::new(request.options(), request.prompt()).map_err(engine("sampler"))?;
        let reused = if request.options().cache_prompt {
            model.prefixes().take(request.prompt())
        } else {
            None
        };
        let (caches, fed) = match reused {
            Some(found) => found,
            None => (decoder.new_caches(model.cache_options()), 0),
        };
        request.clock().cached(fed);
        Ok(Self {
            decoder,
            caches,
            sampler,
            next: None,
            fed,
        })
    }

    /// Queues the step that follows `token` and returns its token and logits, not yet computed.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn decode(&mut self, token: &Array) -> mlx_rs_core::Result<Pending> {
        let ids = token.reshape(&[1, 1])?;
        let mut rows = [Row {
            length: 1,
            caches: &mut self.caches,
        }];
        let logits =
            self.decoder
                .forward(&ids, &mut rows, Positions::Last, &mut Watch::nothing())?;
        self.draw(&logits)
    }

    /// Samples from logits `[1, 1, vocab]` and starts the computation. Caches are evaluated with
    /// it, so that no step keeps the graph of the steps before.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn draw(&mut self, logits: &Array) -> mlx_rs_core::Result<Pending> {
        let logits = logits.squeeze_axis(1)?; // [1, 1, V] -> [1, V]
        let token = self.sampler.sample(&logits)?;
        async_eval(
            [&token, &logits]
                .into_iter()
                .chain(self.sampler.state())
                .chain(self.caches.iter().flat_map(|c| c.state())),
        )?;
        Ok((token, logits))
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
