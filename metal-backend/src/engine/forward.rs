//! Forward passes of one sequence, split into steps. Steps limit memory, and let a caller interrupt
//! the computation.

use inference::Result;
use mlx_rs_core::{Array, memory};

use crate::arch::Decoder;
use crate::cache::{self, Caches, Row};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::nn::hooks::{StateHook, Watch};

/// The maximum number of unused bytes that MLX keeps after a step.
const UNUSED: usize = 64 << 20;

/// Returns MLX's unused memory to the system, if it exceeds `UNUSED`. The threshold exists because
/// MLX then waits for all streams of the process, and there may be hundreds.
pub fn free_unused() -> mlx_rs_core::Result<()> {
    match memory::cache()? > UNUSED {
        true => memory::clear_cache(),
        false => Ok(()),
    }
}

/// Runs `prompt` through the model in steps of at most `step` tokens. Returns the logits of the
/// last position, `[1, 1, vocab]`, not yet evaluated. `hook`, if given, observes the steps. Before
/// each further step, `between` receives the number of positions done.
///
/// # Errors
/// If memory runs out, or `between` returns an error.
pub fn forward_prompt(
    decoder: &dyn Decoder,
    prompt: &[u32],
    (caches, mut hook): (&mut Caches, Option<&mut dyn StateHook>),
    step: usize,
    between: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Array> {
    let mut done = 0;
    let mut rest = prompt;
    while rest.len() > step.max(1) {
        let (now, later) = rest.split_at(step.max(1));
        // The logits of this step are not evaluated; the step only adds keys and values.
        let again: Option<&mut dyn StateHook> = match &mut hook {
            Some(hook) => Some(&mut **hook),
            None => None,
        };
        forward(decoder, now, (&mut *caches, again), Positions::Last)
            .and_then(|_| cache::eval_caches(caches))
            .and_then(|()| free_unused())
            .map_err(engine("prefill"))?;
        done += now.len();
        between(done)?;
        rest = later;
    }
    forward(decoder, rest, (caches, hook), Positions::Last).map_err(engine("prefill"))
}

/// Runs one forward pass of one sequence. Returns logits that are not yet evaluated.
pub fn forward(
    decoder: &dyn Decoder,
    tokens: &[u32],
    (caches, hook): (&mut Caches, Option<&mut dyn StateHook>),
    positions: Positions,
) -> mlx_rs_core::Result<Array> {
    let ids = ids(tokens)?;
    let mut rows = [Row {
        length: ids.dim(1)?,
        caches,
    }];
    let mut watch = match hook {
        Some(hook) => Watch::hooked(hook),
        None => Watch::nothing(),
    };
    decoder.forward(&ids, &mut rows, positions, &mut watch)
}

/// Converts token ids to an array `[1, n]`.
pub fn ids(tokens: &[u32]) -> mlx_rs_core::Result<Array> {
    Array::vector(tokens)?.expand_dims(0)
}
