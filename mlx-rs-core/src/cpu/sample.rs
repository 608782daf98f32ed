//! Sampling as an operation of MLX's graph: one token for each row of logits.
//! `mlx-cpu-kernels/src/sampling` has the kernels.

use mlx_cpu_kernels::{MAX_ROW_LEN, Pick, Sample, SampleParams};

use super::host_op::{self, OpKind};
use super::logits::size;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The sampling of one row of logits.
#[derive(Debug, Clone)]
pub struct SampleRow {
    /// Earlier tokens that penalties apply to, in order, the latest one last: uint32, of any shape.
    pub seen: Option<Array>,
    /// Penalties, biases, bans, and the choice.
    pub params: SampleParams,
}

impl From<SampleParams> for SampleRow {
    /// A row without earlier tokens.
    fn from(params: SampleParams) -> Self {
        Self { seen: None, params }
    }
}

/// Chooses one token per row of float32 `[rows, n]`: uint32 `[rows]`. Computed on the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` have another type or shape, their number of rows differs from
/// the length of `rows`, or earlier tokens are not uint32; [`ErrorKind::Index`] for a forced token
/// of [`MAX_ROW_LEN`](super::MAX_ROW_LEN) or more; MLX's message when the current stream is not on
/// the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[1.0f32, 3.0, 2.0], &[1, 3])?;
///     let greedy = cpu::SampleParams::new(cpu::Pick::Greedy);
///     let row = cpu::SampleParams { banned: [1].into(), ..greedy };
///     assert_eq!(cpu::sample(&logits, vec![row.into()])?.to_vec::<u32>()?, [2]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn sample(logits: &Array, rows: Vec<SampleRow>) -> Result<Array> {
    const OP: &str = "cpu::sample";
    let (count, n) = size(OP, logits)?;
    let shape = |message: String| Err(Error::new(ErrorKind::Shape, OP, message));
    if rows.len() != count {
        return shape(format!(
            "{} rows were given for {count} rows of logits",
            rows.len()
        ));
    }
    // The kernel returns tokens as float32, which cannot represent all greater tokens exactly.
    let beyond =
        |row: &SampleRow| matches!(row.params.pick, Pick::Forced(id) if id as usize >= MAX_ROW_LEN);
    if let Some(row) = rows.iter().find(|row| beyond(row)) {
        let message = format!(
            "{:?} is no token: they are below {MAX_ROW_LEN}",
            row.params.pick
        );
        return Err(Error::new(ErrorKind::Index, OP, message));
    }
    let mut plans = Vec::with_capacity(count);
    let mut seen = Vec::new();
    for row in rows {
        let input = match row.seen {
            Some(tokens) if tokens.dtype() != Dtype::Uint32 => {
                return shape(format!("tokens seen are {:?}, not uint32", tokens.dtype()));
            }
            Some(tokens) => {
                seen.push(tokens);
                Some(seen.len())
            }
            None => None,
        };
        plans.push((row.params, input));
    }
    let inputs: Vec<&Array> = std::iter::once(logits).chain(&seen).collect();
    let work = Sample { n, rows: plans };
    host_op::add(OP, OpKind::Opaque, work, &inputs, &[count as i32])?.astype(Dtype::Uint32)
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
