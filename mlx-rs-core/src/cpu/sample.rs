//! A token for each row of logits, in one operation: what changes logits (penalties, biases, bans), what
//! filters them, and the draw. Not the passes over rows that it is made of (`weigh`, `select`, `nucleus`).
//!
//! As separate operations each of these stages reads and writes the whole vocabulary, in some sixty nodes a
//! token; here a row is copied at most once, tokens that are penalized are touched alone, and what a filter
//! leaves is a short list.

use std::sync::Arc;

use mlx_cpu_kernels::{CountPenalties, Pick, RepetitionPenalty, Sample, SampleParams};

use super::host_op::{self, Meaning};
use super::logits::size;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// What is done with one row of logits, in the order of the fields. Tokens beyond the row are ignored.
#[derive(Debug, Clone)]
pub struct Row {
    /// The tokens that penalties look at, the latest last: uint32, of any shape.
    pub seen: Option<Array>,
    /// The repetition penalty.
    pub repeat: Option<RepetitionPenalty>,
    /// Presence and frequency penalties.
    pub count: Option<CountPenalties>,
    /// What is added to the logits of tokens.
    pub bias: Arc<[(u32, f32)]>,
    /// Tokens that are impossible.
    pub never: Arc<[u32]>,
    /// The tokens that are possible: token `i` is bit `i % 32` of word `i / 32`, and words that are missing
    /// count as zero.
    pub only: Option<Vec<u32>>,
    /// The choice.
    pub pick: Pick,
}

impl Row {
    /// A row that nothing is done with but to choose.
    /// ```
    /// use mlx_rs_core::cpu::{Pick, Row};
    /// assert!(Row::new(Pick::Greedy).bias.is_empty());
    /// ```
    pub fn new(pick: Pick) -> Self {
        Self {
            seen: None,
            repeat: None,
            count: None,
            bias: Arc::default(),
            never: Arc::default(),
            only: None,
            pick,
        }
    }
}

/// A token for each row of float32 `[rows, n]`: uint32 `[rows]`. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` are of another type or shape, there are not as many `rows`, or what a
/// row has seen is not uint32; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[1.0f32, 3.0, 2.0], &[1, 3])?;
///     let row = cpu::Row { never: [1].into(), ..cpu::Row::new(cpu::Pick::Greedy) };
///     assert_eq!(cpu::choose(&logits, vec![row])?.to_vec::<u32>()?, [2]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn choose(logits: &Array, rows: Vec<Row>) -> Result<Array> {
    const OP: &str = "cpu::choose";
    let (count, n) = size(OP, logits)?;
    let shape = |message: String| Err(Error::new(ErrorKind::Shape, OP, message));
    if rows.len() != count {
        return shape(format!("{} rows for logits of {count}", rows.len()));
    }
    let mut plans = Vec::with_capacity(count);
    let mut seen = Vec::new();
    for row in rows {
        let Row {
            seen: tokens,
            repeat,
            count,
            bias,
            never,
            only,
            pick,
        } = row;
        let choice = SampleParams {
            repeat,
            count,
            bias,
            banned: never,
            allowed: only,
            pick,
        };
        if let Some(tokens) = tokens {
            if tokens.dtype() != Dtype::Uint32 {
                return shape(format!("tokens seen are {:?}, not uint32", tokens.dtype()));
            }
            seen.push(tokens);
            plans.push((choice, Some(seen.len())));
        } else {
            plans.push((choice, None));
        }
    }
    let inputs: Vec<&Array> = std::iter::once(logits).chain(&seen).collect();
    let work = Sample { n, rows: plans };
    host_op::add(OP, Meaning::Opaque, work, &inputs, &[count as i32])?.astype(Dtype::Uint32)
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
