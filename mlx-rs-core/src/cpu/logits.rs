//! Log-probabilities of elements of long rows, as an operation of MLX's graph. MLX sorts whole
//! rows. The kernel makes a single pass over each row.

use mlx_cpu_kernels::{LogProbs, MAX_ROW_LEN};

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Checks that `logits` is float32 `[rows, n]` of a size that the kernels support, and returns
/// `rows` and `n`.
pub(super) fn size(op: &'static str, logits: &Array) -> Result<(usize, usize)> {
    match *logits.shape() {
        [rows, n] if rows > 0 && n > 0 && logits.dtype() == Dtype::Float32 => {
            let (rows, n) = (rows.unsigned_abs() as usize, n.unsigned_abs() as usize);
            if n <= MAX_ROW_LEN {
                return Ok((rows, n));
            }
        }
        _ => {}
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("needs float32 [rows, n], not empty, n at most {MAX_ROW_LEN}"),
    )
    .with_inputs(&[logits]))
}

/// Log-probabilities under the softmax of rows `[rows, n]`.
#[derive(Debug, Clone)]
pub struct LogProbabilities {
    /// The log-probability of the chosen element of each row: float32 `[rows]`.
    pub chosen: Array,
    /// The greatest log-probabilities of each row, ascending: float32 `[rows, k]`.
    pub values: Array,
    /// The indices of `values`: uint32 `[rows, k]`.
    pub indices: Array,
}

/// The log-probabilities of the elements `chosen` (uint32 `[rows]`) of float32 `[rows, n]`, and of
/// the `k` greatest elements of each row. Among equal elements, those with greater indices are
/// returned. An index beyond the row has probability zero. Computed on the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when an array is of another type or shape; [`ErrorKind::Index`] when `k` is
/// more than `n`; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[0.25f32.ln(), 0.75f32.ln()], &[1, 2])?;
///     let found = cpu::log_probabilities(&logits, &Array::vector(&[0u32])?, 1)?;
///     assert!((found.chosen.to_vec::<f32>()?[0].exp() - 0.25).abs() < 1e-6);
///     assert_eq!(found.indices.to_vec::<u32>()?, [1]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn log_probabilities(logits: &Array, chosen: &Array, k: usize) -> Result<LogProbabilities> {
    const OP: &str = "cpu::log_probabilities";
    let (rows, n) = size(OP, logits)?;
    if k > n {
        return Err(Error::new(
            ErrorKind::Index,
            OP,
            format!("cannot take {k} elements of rows of {n}"),
        ));
    }
    let (rows_i, k_i) = (rows as i32, k as i32); // both were dimensions, or are below one
    if chosen.dtype() != Dtype::Uint32 || chosen.shape() != [rows_i] {
        return Err(Error::new(
            ErrorKind::Shape,
            OP,
            format!("needs an element of each of {rows} rows: uint32 [{rows}]"),
        )
        .with_inputs(&[chosen]));
    }
    let out = host_op::add(
        OP,
        OpKind::Opaque,
        LogProbs { rows, n, k },
        &[logits, chosen],
        &[rows_i, 2 * k_i + 1],
    )?;
    Ok(LogProbabilities {
        chosen: out.slice_axis(1, 0, 1)?.squeeze_axis(1)?,
        values: out.slice_axis(1, 1, k_i + 1)?,
        indices: out
            .slice_axis(1, k_i + 1, 2 * k_i + 1)?
            .astype(Dtype::Uint32)?,
    })
}

#[cfg(test)]
#[path = "logits_tests.rs"]
mod tests;
