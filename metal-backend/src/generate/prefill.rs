//! Prefill: the prompt goes through the model in steps, so that memory stays bounded and a request
//! can be cancelled between them.

use inference::{GenerateOptions, Result};
use mlx_rs_core::{Array, eval, memory};

use super::Running;
use crate::arch::Decoder;
use crate::cache::Caches;
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::sample::Drawn;

/// Positions in one forward pass.
pub const PREFILL_STEP: usize = 512;

impl Running {
    /// Runs the prompt and queues the first token: its id and logits, not yet computed.
    pub(super) fn prefill(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<(Drawn, Array)> {
        let logits = forward_prompt(
            self.decoder.as_ref(),
            prompt,
            &mut self.caches,
            Positions::Last,
            &mut |_| options.check_interrupt(),
        )?;
        self.draw(&logits)
    }
}

/// Runs `prompt` through the model in steps and returns the logits of the last step: of its last
/// position `[1, 1, vocab]`, or of all its positions. `between` is asked before each further step
/// with the number of positions done.
pub fn forward_prompt(
    decoder: &dyn Decoder,
    prompt: &[u32],
    caches: &mut Caches,
    positions: Positions,
    between: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Array> {
    let mut done = 0;
    let mut rest = prompt;
    while rest.len() > PREFILL_STEP {
        let (step, more) = rest.split_at(PREFILL_STEP);
        // The logits stay uncomputed: only keys and values are asked for.
        ids(step)
            .and_then(|ids| decoder.forward(&ids, caches, Positions::Last))
            .and_then(|_| eval(caches.iter().flat_map(|c| c.state())))
            .and_then(|()| memory::clear_cache())
            .map_err(engine("prefill"))?;
        done += step.len();
        between(done)?;
        rest = more;
    }
    ids(rest)
        .and_then(|ids| decoder.forward(&ids, caches, positions))
        .map_err(engine("prefill"))
}

/// Ids as `[1, n]`.
pub fn ids(tokens: &[u32]) -> mlx_rs_core::Result<Array> {
    Array::vector(tokens)?.expand_dims(0)
}
