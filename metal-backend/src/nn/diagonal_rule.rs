//! A matrix memory with a forget gate per channel of its keys, and with rank-one updates: Kimi
//! Delta Attention (Kimi Team 2025, arXiv:2510.26692) and RWKV-7 (Peng et al. 2025,
//! arXiv:2503.14456). The rule runs as single steps or over chunks of positions, with equal
//! results. This file uses plain float32 operations; on the CPU, a kernel computes the steps.
//!
//! With the logarithms `f` of the forget gates:
//!
//! ```text
//! u  = a S                            what the memory holds for `a`
//! S' = diag(exp(f)) S + b^T u + k^T v
//! y  = q S'
//! ```
//!
//! Within a chunk, with `F[t, s]` the sum of `f` over positions `s + 1` to `t`:
//!
//! ```text
//! (I - AB) u = (a exp(F[t-1, start])) S + AK v
//! AB[t, s] = sum over channels of a_t b_s exp(F[t-1, s]) for s < t, and AK with k_s
//! ```
//!
//! The exponents are never positive. A product of one factor per position would overflow, so the
//! exponentials of all pairs are computed, and the chunks are short.

use mlx_rs_core::{Array, Dtype, Result, eye, stack, tri, where_};

use super::adapter;
use super::chunks::{cut, joined};
use super::delta_rule::inverse;
use crate::exec::recurrence::{DiagonalMemory, by_kernel};

/// The number of positions per chunk of the plain operations.
const CHUNK: i32 = 16;

/// The inputs of the rule: `R` rows, `L` positions, `H` heads. The functions for MLX's operations
/// receive these inputs with heads before positions.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries, `[R, L, H, DK]`.
    pub q: Array,
    /// Keys, `[R, L, H, DK]`.
    pub k: Array,
    /// Values, `[R, L, H, DV]`.
    pub v: Array,
    /// Logarithms of the forget gates, at most 0, `[R, L, H, DK]`.
    pub f: Array,
    /// The keys that read the memory before a step, `[R, L, H, DK]`.
    pub a: Array,
    /// The keys that write the values read by `a`, `[R, L, H, DK]`; `None` if they equal `k`.
    pub b: Option<Array>,
}

impl Inputs {
    /// Returns the inputs with `f` applied to each array.
    fn map(&self, f: impl Fn(&Array) -> Result<Array>) -> Result<Self> {
        Ok(Self {
            q: f(&self.q)?,
            k: f(&self.k)?,
            v: f(&self.v)?,
            f: f(&self.f)?,
            a: f(&self.a)?,
            b: self.b.as_ref().map(f).transpose()?,
        })
    }
}

/// Computes any number of positions. Returns the outputs `[R, L, H, DV]` and the memory `[R, H, DK,
/// DV]` after the last position.
///
/// # Errors
/// If shapes do not match.
pub fn scan(inputs: &Inputs, memory: &Array) -> Result<(Array, Array)> {
    let flat = inputs.map(|a| a.flatten(2, 3))?;
    let positions = DiagonalMemory {
        q: &flat.q,
        k: &flat.k,
        v: &flat.v,
        f: &flat.f,
        a: &flat.a,
        b: flat.b.as_ref(),
    };
    if let Some((y, memory)) = by_kernel(adapter::differentiated(), || positions.scan(memory))? {
        return Ok((y.reshape(inputs.v.shape())?, memory));
    }
    let heads_first = inputs.map(|a| a.swap_axes(1, 2))?;
    let (y, memory) = by_chunks(&heads_first, memory, CHUNK)?;
    Ok((y.swap_axes(1, 2)?, memory))
}

/// Computes one step (`L` is 1). Returns the output `[R, H, 1, DV]` and the memory `[R, H, DK, DV]`
/// after the step.
fn step(inputs: &Inputs, memory: &Array) -> Result<(Array, Array)> {
    let Inputs { q, k, v, f, a, b } = inputs;
    let column = |a: &Array| a.swap_axes(-1, -2);
    let read = a.matmul(memory)?; // [R, H, 1, DV]
    let decayed = memory.multiply(&column(&f.exp()?)?)?;
    let memory = match b {
        None => decayed.add(&column(k)?.multiply(&read.add(v)?)?)?,
        Some(b) => decayed
            .add(&column(b)?.multiply(&read)?)?
            .add(&column(k)?.multiply(v)?)?,
    };
    Ok((q.matmul(&memory)?, memory))
}

/// Computes any number of positions, in chunks of `size`; a single position uses [`step`]. Returns
/// the outputs `[R, H, L, DV]` and the memory `[R, H, DK, DV]` after the last position.
fn by_chunks(inputs: &Inputs, memory: &Array, size: i32) -> Result<(Array, Array)> {
    let length = inputs.f.dim(2)?;
    if length == 1 {
        return step(inputs, memory);
    }
    let size = size.clamp(1, length);
    let count = (length + size - 1) / size;
    let chunks = inputs.map(|a| cut(a, size, count))?;
    let mut memory = memory.clone();
    let mut outputs = Vec::new();
    for at in 0..count {
        let of = |a: &Array| a.slice_axis(2, at, at + 1)?.squeeze_axis(2);
        let (output, after) = chunk(&chunks.map(of)?, &memory, size)?;
        outputs.push(output);
        memory = after;
    }
    Ok((joined(&outputs, length)?, memory))
}

/// Computes the `size` positions of a chunk.
fn chunk(inputs: &Inputs, memory: &Array, size: i32) -> Result<(Array, Array)> {
    let Inputs { q, k, v, f, a, b } = inputs;
    let between = between(f, size)?;
    // The query of a position reads after the position's own gate.
    let left = stack(&[a, &q.multiply(&f.exp()?)?], 3)?; // [R, H, C, 2, DK]
    let own = eye(size, size, 0, Dtype::Float32)?;
    // For keys `[R, H, C, DK]`, returns the weights of their writes when `a` and when queries read.
    let weights = |keys: &Array| -> Result<(Array, Array)> {
        let keys_left = between.multiply(&keys.expand_dims(2)?)?; // [R, H, C, C, DK]
        let both = left.matmul(&keys_left.swap_axes(-1, -2)?)?; // [R, H, C, 2, C]
        let one = |at: i32| both.slice_axis(3, at, at + 1)?.squeeze_axis(3);
        let same = q.multiply(keys)?.sum(-1, true)?.multiply(&own)?;
        Ok((one(0)?, one(1)?.add(&same)?))
    };
    let (read_keys, query_keys) = weights(k)?;
    let others = b.as_ref().map(weights).transpose()?;
    let read_others = others.as_ref().map_or(&read_keys, |(read, _)| read);
    let solved = inverse(&read_others.negative()?, size)?;
    let sums = f.cumsum(2, false, true)?;
    let before = f.cumsum(2, false, false)?.exp()?;
    let known = a.multiply(&before)?.matmul(memory)?;
    let read = solved.matmul(&known.add(&read_keys.matmul(v)?)?)?; // [R, H, C, DV]
    let rest = f.cumsum(2, true, false)?.exp()?;
    let writes = |keys: &Array| keys.multiply(&rest)?.swap_axes(-1, -2);
    let first = q.multiply(&sums.exp()?)?.matmul(memory)?;
    let keep = sums.slice_axis(2, size - 1, size)?.exp()?;
    let kept = memory.multiply(&keep.swap_axes(-1, -2)?)?;
    Ok(match (b, others) {
        (Some(b), Some((_, query_others))) => (
            first
                .add(&query_others.matmul(&read)?)?
                .add(&query_keys.matmul(v)?)?,
            kept.add(&writes(b)?.matmul(&read)?)?
                .add(&writes(k)?.matmul(v)?)?,
        ),
        _ => {
            let all = read.add(v)?;
            (
                first.add(&query_keys.matmul(&all)?)?,
                kept.add(&writes(k)?.matmul(&all)?)?,
            )
        }
    })
}

/// Returns the decay `[R, H, C, C, DK]` for `f` `[R, H, C, DK]`. Element `[row, column]` is the
/// fraction of the column's write, per channel, that remains before the row's position; 0 unless
/// the column is before the row.
///
/// Sums the `f` between two positions directly, because the difference of two long sums would lose
/// precision.
fn between(f: &Array, size: i32) -> Result<Array> {
    let before = tri(size, size, -1, Dtype::Float32)?.expand_dims(-1)?; // [C, C, 1]
    let sums = (f.expand_dims(3)?.multiply(&before)?).cumsum(2, false, false)?;
    let causal = tri(size, size, -1, Dtype::Bool)?.expand_dims(-1)?;
    where_(&causal, &sums.exp()?, &Array::scalar(0.0f32)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::chunks::test_support::{distance, numbers};
    use mlx_rs_core::{Stream, zeros};

    const H: usize = 2;
    const DK: usize = 5;
    const DV: usize = 3;

    fn array(values: &[f32], width: usize) -> Array {
        let length = values.len() / H / width;
        Array::from_slice(values, &[1, H as i32, length as i32, width as i32]).unwrap()
    }

    /// Returns random inputs, where `a` is a unit vector times a negative strength. `gate` maps a
    /// random number to a gate. `writes` says whether `b` differs from the keys, as in RWKV-7.
    fn case(length: usize, gate: fn(f32) -> f32, writes: bool) -> Inputs {
        let unit = |seed: u64| {
            let mut all = numbers(H * length * DK, seed);
            for row in all.chunks_mut(DK) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                row.iter_mut().for_each(|x| *x /= norm);
            }
            all
        };
        let f: Vec<f32> = (numbers(H * length * DK, 4).into_iter().map(gate)).collect();
        let strengths = numbers(H * length, 5);
        let strength = |at: usize| 0.5 + 0.5 * strengths[at / DK];
        let keys = unit(2);
        let scaled = |by: &dyn Fn(usize) -> f32| -> Vec<f32> {
            let scaled = keys.iter().enumerate().map(|(i, key)| key * by(i));
            scaled.collect()
        };
        let (k, a, b) = match writes {
            // The delta rule reads the memory after its gate, so `a` includes the gate.
            false => (keys.clone(), scaled(&|i| -strength(i) * f[i].exp()), None),
            true => (unit(6), scaled(&|_| -1.0), Some(scaled(&strength))),
        };
        Inputs {
            q: array(&unit(1), DK),
            k: array(&k, DK),
            v: array(&numbers(H * length * DV, 3), DV),
            f: array(&f, DK),
            a: array(&a, DK),
            b: b.map(|b| array(&b, DK)),
        }
    }

    fn empty() -> Array {
        zeros(&[1, H as i32, DK as i32, DV as i32], Dtype::Float32).unwrap()
    }

    /// Computes the definition in float64. Returns the outputs `[1, H, L, DV]` and the final
    /// memory.
    fn defined(inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let wide = |a: &Array| -> Vec<f64> {
            let all = a.to_vec::<f32>().unwrap();
            all.into_iter().map(f64::from).collect()
        };
        let writes = inputs.b.as_ref().unwrap_or(&inputs.k);
        let Inputs { q, k, v, f, a, .. } = inputs;
        let [q, k, v, f, a, b] = [q, k, v, f, a, writes].map(wide);
        let length = f.len() / H / DK;
        let (mut outputs, mut memories) = (Vec::new(), Vec::new());
        for head in 0..H {
            let mut s = [[0.0f64; DV]; DK];
            for step in 0..length {
                let t = head * length + step;
                let at = |all: &[f64], channel: usize| all[t * DK + channel];
                let read: Vec<f64> = (0..DV)
                    .map(|c| (0..DK).map(|d| at(&a, d) * s[d][c]).sum())
                    .collect();
                for (d, row) in s.iter_mut().enumerate() {
                    for (c, value) in row.iter_mut().enumerate() {
                        *value = *value * at(&f, d).exp()
                            + at(&b, d) * read[c]
                            + at(&k, d) * v[t * DV + c];
                    }
                }
                outputs.extend((0..DV).map(|c| (0..DK).map(|d| at(&q, d) * s[d][c]).sum::<f64>()));
            }
            memories.extend(s.into_iter().flatten());
        }
        (outputs, memories)
    }

    #[test]
    fn chunks_of_any_length_and_steps_are_the_definition() {
        let gates: [fn(f32) -> f32; 4] =
            [|x| -0.1 * x.abs(), |x| -20.0 * x.abs(), |_| 0.0, |_| -200.0];
        for gate in gates {
            for writes in [false, true] {
                for length in [1, 2, 37, 64] {
                    let inputs = case(length, gate, writes);
                    let (outputs, memories) = defined(&inputs);
                    for size in [1, 2, 7, 16, 1000] {
                        let (y, memory) = by_chunks(&inputs, &empty(), size).unwrap();
                        assert!(distance(&y, &outputs) < 1e-5, "{length} by {size}");
                        assert!(distance(&memory, &memories) < 1e-5, "{length} by {size}");
                    }
                }
            }
        }
    }

    #[test]
    fn many_positions_by_chunks_are_those_by_steps() {
        for writes in [false, true] {
            let inputs = case(500, |x| -0.05 * x.abs(), writes);
            let (y, memory) = by_chunks(&inputs, &empty(), 16).unwrap();
            let mut state = empty();
            let mut steps = Vec::new();
            for at in 0..500 {
                let one = inputs.map(|a| a.slice_axis(2, at, at + 1)).unwrap();
                let (y, after) = step(&one, &state).unwrap();
                mlx_rs_core::eval([&y, &after]).unwrap();
                steps.push(y);
                state = after;
            }
            let steps = joined(&steps, 500).unwrap();
            assert!(y.all_close(&steps, 0.0, 1e-5).unwrap());
            assert!(memory.all_close(&state, 0.0, 1e-5).unwrap());
        }
    }

    /// The kernel has its own tests. This test checks that it receives positions and heads in the
    /// right order.
    #[test]
    fn scans_on_the_cpu_are_the_definition() {
        let cpu = Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
        cpu.scope(|| {
            for writes in [false, true] {
                let inputs = case(9, |x| -0.1 * x.abs(), writes);
                let (outputs, memories) = defined(&inputs);
                let positions_first = inputs.map(|a| a.swap_axes(1, 2)).unwrap();
                let (y, memory) = scan(&positions_first, &empty()).unwrap();
                let y = y.swap_axes(1, 2).unwrap().contiguous().unwrap();
                assert!(distance(&y, &outputs) < 1e-5);
                assert!(distance(&memory, &memories) < 1e-5);
            }
        });
    }
}
