//! Who draws tokens and finds log-probabilities. How MLX does is in `sample/chain.rs` and
//! `sample/logprobs.rs`.

use mlx_rs_core::{Array, Result, cpu};

/// What a row wants of the kernel.
pub use mlx_rs_core::cpu::{
    CountPenalties, DrawParams, LogProbabilities, Pick, RepetitionPenalty, SampleParams, SampleRow,
};

/// More alternatives than this are found by sorting.
const MOST_ALTERNATIVES: usize = 1024;

/// Whether the kernel draws from logits of this many tokens. `on_cpu` says that sampling runs on
/// the CPU.
pub fn by_kernel(on_cpu: bool, vocabulary: usize) -> bool {
    on_cpu && cpu::enabled() && vocabulary <= cpu::MAX_ROW_LEN
}

/// A token for each row of float32 logits `[B, V]`, `uint32 [B]`, by the kernel.
///
/// # Errors
/// When there is not one row of logits for each of `rows`, or the current stream is not on the CPU.
pub fn sample(logits: &Array, rows: Vec<SampleRow>) -> Result<Array> {
    cpu::sample(logits, rows)
}

/// Log-probabilities of `tokens` `[B]` under float32 logits `[B, V]`, and the `n` most probable
/// tokens, by the kernel. `None` where MLX finds them. `on_cpu` as in [`by_kernel`].
///
/// # Errors
/// When shapes do not fit.
pub fn log_probabilities(
    logits: &Array,
    tokens: &Array,
    n: usize,
    on_cpu: bool,
) -> Result<Option<LogProbabilities>> {
    if !on_cpu || !cpu::enabled() || n > MOST_ALTERNATIVES {
        return Ok(None);
    }
    cpu::log_probabilities(logits, tokens, n).map(Some)
}
