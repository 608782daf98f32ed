//! The mLSTM recurrence (Beck et al. 2024, arXiv:2405.04517, section 2.3; stabilized as in xLSTM
//! 7B, arXiv:2503.13427): a matrix memory `C` with exponential gates. It runs as single steps or
//! over chunks of positions, with equal results. This file uses plain float32 operations;
//! `mlstm.rs` has projections and norms.
//!
//! With `f = logsigmoid(forget gate)` and the input gate `i`, both logarithms:
//!
//! ```text
//! m' = max(f + m, i)
//! C' = exp(f + m - m') C + exp(i - m') k v^T
//! n' = exp(f + m - m') n + exp(i - m') k
//! h  = q C' / (max(|q n'|, exp(-m')) + eps)
//! ```
//!
//! `m` keeps every exponent at or below zero, so no gate overflows.

use mlx_rs_core::kernel::{MlstmInputs, MlstmMemory, mlstm};
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, tri, where_};

/// The minimum `m` for which `exp(-m)` is computed. A smaller `m` would overflow the denominator.
/// The output is zero there in any case, so limiting `m` does not change it.
const LEAST_M: f32 = -80.0;

/// The inputs of the recurrence: `R` rows, `H` heads, `L` positions.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries divided by the root of their width, `[R, H, L, DK]`.
    pub q: Array,
    /// Keys, `[R, H, L, DK]`.
    pub k: Array,
    /// Values, `[R, H, L, DV]`.
    pub v: Array,
    /// Input gates before the exponential, `[R, H, L]`.
    pub i: Array,
    /// Logarithms of the forget gates, `[R, H, L]`.
    pub f: Array,
}

/// The memory: `C` `[R, H, DK, DV]`, `n` `[R, H, DK]`, `m` `[R, H]`.
#[derive(Debug, Clone)]
pub struct Memory {
    /// The sum of the outer products of keys and values, weighted by the gates.
    pub c: Array,
    /// The sum of the keys, weighted by the same gates as `c`.
    pub n: Array,
    /// The logarithm of the divisor of `c` and `n`.
    pub m: Array,
}

impl TryFrom<Vec<Array>> for Memory {
    type Error = Error;

    /// Builds the memory from the arrays of a state, in their order.
    fn try_from(parts: Vec<Array>) -> Result<Self> {
        let [c, n, m] = <[Array; 3]>::try_from(parts)
            .map_err(|_| Error::new(ErrorKind::Value, "mlstm", "a state has three parts"))?;
        Ok(Self { c, n, m })
    }
}

fn scalar(value: f32) -> Result<Array> {
    Array::scalar(value)
}

/// Computes `-log(1 + exp(-x))`, in a form that is precise even if the sigmoid is near 0 or 1.
pub fn log_sigmoid(x: &Array) -> Result<Array> {
    scalar(0.0)?.logaddexp(&x.negative()?)?.negative()
}

/// Computes `max(|dot|, exp(-m)) + eps`.
fn denominator(dot: &Array, m: &Array, eps: f32) -> Result<Array> {
    let least = m.maximum(&scalar(LEAST_M)?)?.negative()?.exp()?;
    dot.abs()?.maximum(&least)?.add(&scalar(eps)?)
}

/// Computes all positions with GPU kernels. Returns the same result as [`scan`].
///
/// # Errors
/// If shapes do not match, or there is no GPU.
pub fn scan_on_gpu(
    inputs: &Inputs,
    memory: &Memory,
    chunk: i32,
    eps: f32,
) -> Result<(Array, Memory)> {
    // The kernels use one axis for rows and heads.
    let [rows, heads, length] = [inputs.f.dim(0)?, inputs.f.dim(1)?, inputs.f.dim(2)?];
    let flat = |a: &Array| a.flatten(0, 1);
    let (q, k, v) = (flat(&inputs.q)?, flat(&inputs.k)?, flat(&inputs.v)?);
    let (i, f) = (flat(&inputs.i)?, flat(&inputs.f)?);
    let positions = MlstmInputs {
        q: &q,
        k: &k,
        v: &v,
        i: &i,
        f: &f,
    };
    let before = MlstmMemory {
        c: flat(&memory.c)?,
        n: flat(&memory.n)?,
        m: flat(&memory.m)?,
    };
    let (h, after) = mlstm(&positions, &before, chunk.min(length), eps)?;
    let apart = |a: &Array| {
        let mut shape = vec![rows, heads];
        shape.extend(&a.shape()[1..]);
        a.reshape(&shape)
    };
    let memory = Memory {
        c: apart(&after.c)?,
        n: apart(&after.n)?,
        m: apart(&after.m)?,
    };
    Ok((apart(&h)?, memory))
}

/// Computes one position (`L` is 1). Returns the output `[R, H, 1, DV]` and the memory after it.
pub fn step(inputs: &Inputs, memory: &Memory, eps: f32) -> Result<(Array, Memory)> {
    let Inputs { q, k, v, i, f } = inputs;
    let decayed = f.squeeze_axis(-1)?.add(&memory.m)?; // [R, H]
    let i = i.squeeze_axis(-1)?;
    let m = decayed.maximum(&i)?;
    let keep = decayed.subtract(&m)?.exp()?.expand_dims(-1)?; // [R, H, 1]
    let take = i.subtract(&m)?.exp()?.expand_dims(-1)?;
    let key = k.squeeze_axis(-2)?.multiply(&take)?; // [R, H, DK]
    let n = memory.n.multiply(&keep)?.add(&key)?;
    // [R, H, DK, 1] * [R, H, 1, DV]
    let new = key.expand_dims(-1)?.multiply(v)?;
    let c = memory.c.multiply(&keep.expand_dims(-1)?)?.add(&new)?;
    let dot = q.matmul(&n.expand_dims(-1)?)?; // [R, H, 1, 1]
    let m_here = m.expand_dims(-1)?.expand_dims(-1)?;
    let h = q.matmul(&c)?.divide(&denominator(&dot, &m_here, eps)?)?;
    Ok((h, Memory { c, n, m }))
}

/// Computes all `L` positions as one chunk: attention in the chunk, and one update of the memory.
/// Returns the outputs `[R, H, L, DV]` and the memory after the last position.
pub fn chunk(inputs: &Inputs, memory: &Memory, eps: f32) -> Result<(Array, Memory)> {
    let Inputs { q, k, v, i, f } = inputs;
    let length = f.dim(-1)?;
    let causal = tri(length, length, 0, Dtype::Bool)?;
    let before = tri(length, length, -1, Dtype::Float32)?;
    // `decay[t, s]` is the logarithm of the fraction of the write at s that remains at t: the sum
    // of f over s+1..=t. This sum is computed directly, because a difference of two long sums would
    // lose precision.
    let decay = f
        .expand_dims(-1)?
        .multiply(&before)?
        .cumsum(-2, false, true)?;
    let logits = decay.add(&i.expand_dims(-2)?)?; // [R, H, L, L]
    let logits = where_(&causal, &logits, &scalar(f32::NEG_INFINITY)?)?;
    let from_memory = f.cumsum(-1, false, true)?.add(&memory.m.expand_dims(-1)?)?; // [R, H, L]
    let m = logits.max(-1, false)?.maximum(&from_memory)?;
    let column = m.expand_dims(-1)?; // [R, H, L, 1]
    let weights = logits.subtract(&column)?.exp()?;
    let scores = q.matmul(&k.swap_axes(-1, -2)?)?.multiply(&weights)?;
    let gated = from_memory
        .subtract(&m)?
        .exp()?
        .expand_dims(-1)?
        .multiply(q)?;
    let dot = gated
        .matmul(&memory.n.expand_dims(-1)?)?
        .add(&scores.sum(-1, true)?)?;
    let h = gated
        .matmul(&memory.c)?
        .add(&scores.matmul(v)?)?
        .divide(&denominator(&dot, &column, eps)?)?;

    // In the memory after the chunk, each write has the same weight as at the last position.
    let last = |a: &Array, axis: i32| a.slice_axis(axis, length - 1, length)?.squeeze_axis(axis);
    let decayed = last(&from_memory, -1)?; // [R, H]
    let added = last(&decay, -2)?.add(i)?; // [R, H, L]
    let m = added.max(-1, false)?.maximum(&decayed)?;
    let keep = decayed.subtract(&m)?.exp()?.expand_dims(-1)?; // [R, H, 1]
    let take = added.subtract(&m.expand_dims(-1)?)?.exp()?;
    let keys = k.multiply(&take.expand_dims(-1)?)?; // [R, H, L, DK]
    let n = memory.n.multiply(&keep)?.add(&keys.sum(-2, false)?)?;
    let c = memory
        .c
        .multiply(&keep.expand_dims(-1)?)?
        .add(&keys.swap_axes(-1, -2)?.matmul(v)?)?;
    Ok((h, Memory { c, n, m }))
}

/// Computes any number of positions in chunks of `size`; the last chunk may be shorter. A single
/// position uses [`step`].
pub fn scan(inputs: &Inputs, memory: Memory, size: i32, eps: f32) -> Result<(Array, Memory)> {
    let length = inputs.f.dim(-1)?;
    let mut memory = memory;
    let mut outputs = Vec::new();
    let mut from = 0;
    while from < length {
        let to = length.min(from.saturating_add(size.max(1)));
        let part = if from == 0 && to == length {
            inputs.clone()
        } else {
            inputs.range(from, to)?
        };
        let (h, after) = if to - from == 1 {
            step(&part, &memory, eps)?
        } else {
            chunk(&part, &memory, eps)?
        };
        outputs.push(h);
        memory = after;
        from = to;
    }
    let h = match outputs.as_slice() {
        [one] => one.clone(),
        several => mlx_rs_core::concatenate(&several.iter().collect::<Vec<_>>(), 2)?,
    };
    Ok((h, memory))
}

impl Inputs {
    /// Returns the positions `from..to`.
    fn range(&self, from: i32, to: i32) -> Result<Self> {
        let cut = |a: &Array| a.slice_axis(2, from, to);
        Ok(Self {
            q: cut(&self.q)?,
            k: cut(&self.k)?,
            v: cut(&self.v)?,
            i: cut(&self.i)?,
            f: cut(&self.f)?,
        })
    }
}

#[cfg(test)]
#[path = "mlstm_cell_tests.rs"]
mod tests;
