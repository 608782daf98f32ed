//! Who draws tokens and finds log-probabilities. How MLX does is in `sample/chain.rs` and
//! `sample/logprobs.rs`.

use mlx_rs_core::{Array, Dtype, Result, cpu, zeros};

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

/// The `k` greatest of each row of float32 `[rows, n]`, the greatest first, and where they stand:
/// float32 and uint32 `[rows, k]`. `on_cpu` as in [`by_kernel`].
///
/// # Errors
/// When a row has fewer than `k`.
pub fn greatest_of_rows(values: &Array, k: usize, on_cpu: bool) -> Result<(Array, Array)> {
    let n = values.dim(-1)?;
    let count = i32::try_from(k).unwrap_or(i32::MAX);
    let width = usize::try_from(n).unwrap_or(0);
    let ids = if by_kernel(on_cpu, width) && k <= MOST_ALTERNATIVES {
        let none = zeros(&[values.dim(0)?], Dtype::Uint32)?;
        cpu::log_probabilities(values, &none, k)?.indices
    } else {
        // What stands behind the rank is not less.
        (values.argpartition(n - count, -1)?).slice_axis(-1, n - count, n)?
    };
    let found = values.take_along_axis(&ids, -1)?;
    let order = found.negative()?.argsort(-1)?;
    Ok((
        found.take_along_axis(&order, -1)?,
        ids.take_along_axis(&order, -1)?,
    ))
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
