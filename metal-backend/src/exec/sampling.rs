//! Decides whether our kernels or MLX sample tokens and compute log-probabilities. MLX's
//! implementations are in `sample/chain.rs` and `sample/logprobs.rs`.

use mlx_rs_core::{Array, Dtype, Result, cpu, zeros};

/// The kernels' description of how to sample from a row.
pub use mlx_rs_core::cpu::{
    CountPenalties, DrawParams, LogProbabilities, Pick, RepetitionPenalty, SampleParams, SampleRow,
};

/// For more alternatives, MLX partitions the logits instead.
const MOST_ALTERNATIVES: usize = 1024;

/// Whether the kernel samples from logits of this vocabulary size. `on_cpu` says whether sampling
/// runs on the CPU.
pub fn by_kernel(on_cpu: bool, vocabulary: usize) -> bool {
    on_cpu && cpu::enabled() && vocabulary <= cpu::MAX_ROW_LEN
}

/// Samples one token per row of float32 logits `[B, V]` with the kernel: `uint32 [B]`.
///
/// # Errors
/// If the number of rows differs from `rows`, or the current stream is not on the CPU.
pub fn sample(logits: &Array, rows: Vec<SampleRow>) -> Result<Array> {
    cpu::sample(logits, rows)
}

/// Returns the `k` greatest values of each row of float32 `[rows, n]`, in descending order, and
/// their indices: float32 and uint32 `[rows, k]`. `on_cpu` means the same as in [`by_kernel`].
///
/// # Errors
/// If a row has fewer than `k` values.
pub fn greatest_of_rows(values: &Array, k: usize, on_cpu: bool) -> Result<(Array, Array)> {
    let n = values.dim(-1)?;
    let count = i32::try_from(k).unwrap_or(i32::MAX);
    let width = usize::try_from(n).unwrap_or(0);
    let ids = if by_kernel(on_cpu, width) && k <= MOST_ALTERNATIVES {
        let none = zeros(&[values.dim(0)?], Dtype::Uint32)?;
        cpu::log_probabilities(values, &none, k)?.indices
    } else {
        // `argpartition` puts the `k` greatest values last, in no particular order.
        (values.argpartition(n - count, -1)?).slice_axis(-1, n - count, n)?
    };
    let greatest = values.take_along_axis(&ids, -1)?;
    let order = greatest.negative()?.argsort(-1)?;
    Ok((
        greatest.take_along_axis(&order, -1)?,
        ids.take_along_axis(&order, -1)?,
    ))
}

/// Computes the log-probabilities of `tokens` `[B]` under float32 logits `[B, V]`, and the `n` most
/// probable tokens, with the kernel. Returns `None` if MLX must compute them. `on_cpu` means the
/// same as in [`by_kernel`].
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
