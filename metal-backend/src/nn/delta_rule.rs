//! The gated delta rule (Yang et al. 2024, arXiv:2412.06464): a matrix memory with a forget gate. A
//! write replaces the value stored for its key. The rule runs as single steps or over chunks of
//! positions, with equal results. This file uses plain float32 operations; `gated_delta.rs` has
//! projections, convolution and norms.
//!
//! With the logarithm `f` of the forget gate and the write strength `b`:
//!
//! ```text
//! S' = exp(f) S
//! d  = b (v - k S')        what the key does not yet hold
//! S  = S' + k^T d
//! y  = q S
//! ```
//!
//! Within a chunk the `d` depend on each other: `(I + A) d = b (v - exp(F) k S)`, where `F` is the
//! running sum of `f`, and `A[t, s] = b_t (k_t . k_s) exp(F_t - F_s)` for `s < t`. The inverse of
//! `I + A` is computed for all chunks at once; only the memory passes from chunk to chunk.

use mlx_rs_core::{Array, Dtype, Result, eye, tri};

use super::chunks::{cut, decay, joined};

/// The inputs of the rule: `R` rows, `H` heads, `L` positions.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries, `[R, H, L, DK]`.
    pub q: Array,
    /// Keys, `[R, H, L, DK]`.
    pub k: Array,
    /// Values, `[R, H, L, DV]`.
    pub v: Array,
    /// Logarithms of the forget gates, at most 0, `[R, H, L]`.
    pub f: Array,
    /// Write strengths, `[R, H, L]`.
    pub b: Array,
}

/// Computes one step (`L` is 1). Returns the output `[R, H, 1, DV]` and the memory `[R, H, DK, DV]`
/// after the step.
pub fn step(inputs: &Inputs, memory: &Array) -> Result<(Array, Array)> {
    let Inputs { q, k, v, f, b } = inputs;
    let decayed = memory.multiply(&f.exp()?.expand_dims(-1)?)?;
    let missing = v
        .subtract(&k.matmul(&decayed)?)?
        .multiply(&b.expand_dims(-1)?)?; // [R, H, 1, DV]
    let memory = decayed.add(&k.swap_axes(-1, -2)?.multiply(&missing)?)?;
    Ok((q.matmul(&memory)?, memory))
}

/// Computes any number of positions, in chunks of `size`; a single position uses [`step`]. Returns
/// the outputs `[R, H, L, DV]` and the memory `[R, H, DK, DV]` after the last position.
pub fn scan(inputs: &Inputs, memory: &Array, size: i32) -> Result<(Array, Array)> {
    let length = inputs.f.dim(-1)?;
    if length == 1 {
        return step(inputs, memory);
    }
    let size = size.clamp(1, length);
    let count = (length + size - 1) / size;
    let chunks = Chunks::new(inputs, size, count)?;
    let mut memory = memory.clone();
    let mut outputs = Vec::new();
    for at in 0..count {
        let of = |a: &Array| a.slice_axis(2, at, at + 1)?.squeeze_axis(2);
        let d = of(&chunks.values)?.subtract(&of(&chunks.keys)?.matmul(&memory)?)?;
        let output = of(&chunks.queries)?.matmul(&memory)?;
        outputs.push(output.add(&of(&chunks.scores)?.matmul(&d)?)?);
        let decayed = memory.multiply(&of(&chunks.keep)?)?;
        memory = decayed.add(&of(&chunks.writes)?.matmul(&d)?)?;
    }
    Ok((joined(&outputs, length)?, memory))
}

/// The terms of all chunks that do not depend on the memory, for `N` chunks of `C` positions.
struct Chunks {
    /// The values that the chunk would write to an empty memory, `[R, H, N, C, DV]`.
    values: Array,
    /// The keys that read the values to be replaced from the memory, `[R, H, N, C, DK]`.
    keys: Array,
    /// The queries that read the memory, `[R, H, N, C, DK]`.
    queries: Array,
    /// The weight of each write in the chunk at each position of the chunk, `[R, H, N, C, C]`.
    scores: Array,
    /// The weight of each write in the memory after the chunk, `[R, H, N, DK, C]`.
    writes: Array,
    /// The fraction of the memory that remains after the chunk, `[R, H, N, 1, 1]`.
    keep: Array,
}

impl Chunks {
    fn new(inputs: &Inputs, size: i32, count: i32) -> Result<Self> {
        let cut = |a: &Array| cut(a, size, count);
        let (q, k, v) = (cut(&inputs.q)?, cut(&inputs.k)?, cut(&inputs.v)?);
        let (f, b) = (cut(&inputs.f)?, cut(&inputs.b)?.expand_dims(-1)?);
        let before = tri(size, size, -1, Dtype::Float32)?;
        let decay = decay(&f)?;
        let left = f.cumsum(-1, false, true)?.exp()?; // [R, H, N, C]
        let overlap = k.matmul(&k.swap_axes(-1, -2)?)?;
        let a = overlap.multiply(&decay)?.multiply(&b)?.multiply(&before)?;
        let solved = inverse(&a, size)?;
        let column = left.expand_dims(-1)?;
        let last = |a: &Array, axis: i32| a.slice_axis(axis, size - 1, size);
        // [R, H, N, 1, C] from the last row
        let ends = last(&decay, -2)?;
        Ok(Self {
            values: solved.matmul(&v.multiply(&b)?)?,
            keys: solved.matmul(&k.multiply(&b)?.multiply(&column)?)?,
            queries: q.multiply(&column)?,
            scores: q.matmul(&k.swap_axes(-1, -2)?)?.multiply(&decay)?,
            writes: k.swap_axes(-1, -2)?.multiply(&ends)?,
            keep: last(&column, -2)?,
        })
    }
}

/// Returns `(I + A)^-1` for strictly lower triangular matrices `A` `[.., C, C]`. Merges the
/// inverses `T` of diagonal blocks of 1, 2, 4 ... rows: `T - T B T`, where `B` is the block between
/// two adjacent blocks. Does not use powers of `A`, which would overflow for similar keys.
pub(super) fn inverse(a: &Array, size: i32) -> Result<Array> {
    let mut inverse = eye(size, size, 0, Dtype::Float32)?;
    let mut block = 1;
    while block < size {
        let between = a.multiply(&neighbors(size, block)?)?;
        inverse = inverse.subtract(&inverse.matmul(&between)?.matmul(&inverse)?)?;
        block *= 2;
    }
    Ok(inverse)
}

/// Returns a mask of ones where the row is in the second of two adjacent blocks and the column is
/// in the first.
fn neighbors(size: i32, block: i32) -> Result<Array> {
    let one = |row: i32, column: i32| {
        let pair = row / (2 * block) == column / (2 * block);
        f32::from(u8::from(
            pair && row / block % 2 == 1 && column / block % 2 == 0,
        ))
    };
    let ones: Vec<f32> = (0..size)
        .flat_map(|row| (0..size).map(move |column| one(row, column)))
        .collect();
    Array::from_slice(&ones, &[size, size])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::chunks::test_support::{distance, numbers};
    use mlx_rs_core::zeros;

    const H: usize = 2;
    const DK: usize = 5;
    const DV: usize = 3;

    /// Random inputs with keys and queries of length one. `gate` and `strength` map a random number
    /// to a gate and to a write strength.
    fn case(length: usize, gate: fn(f32) -> f32, strength: fn(f32) -> f32) -> Inputs {
        let unit = |seed: u64| {
            let mut all = numbers(H * length * DK, seed);
            for row in all.chunks_mut(DK) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                row.iter_mut().for_each(|x| *x /= norm);
            }
            let shape = [1, H as i32, length as i32, DK as i32];
            Array::from_slice(&all, &shape).unwrap()
        };
        let each = |seed, by: fn(f32) -> f32| {
            let all: Vec<f32> = numbers(H * length, seed).into_iter().map(by).collect();
            Array::from_slice(&all, &[1, H as i32, length as i32]).unwrap()
        };
        let shape = [1, H as i32, length as i32, DV as i32];
        Inputs {
            q: unit(1),
            k: unit(2),
            v: Array::from_slice(&numbers(H * length * DV, 3), &shape).unwrap(),
            f: each(4, gate),
            b: each(5, strength),
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
        let [q, k, v, f, b] = [&inputs.q, &inputs.k, &inputs.v, &inputs.f, &inputs.b].map(wide);
        let length = f.len() / H;
        let (mut outputs, mut memories) = (Vec::new(), Vec::new());
        for head in 0..H {
            let mut s = [[0.0f64; DV]; DK];
            for step in 0..length {
                let t = head * length + step;
                let (q, k) = (&q[t * DK..(t + 1) * DK], &k[t * DK..(t + 1) * DK]);
                s.iter_mut().flatten().for_each(|x| *x *= f[t].exp());
                for c in 0..DV {
                    let predicted: f64 = (0..DK).map(|a| k[a] * s[a][c]).sum();
                    let missing = b[t] * (v[t * DV + c] - predicted);
                    (0..DK).for_each(|a| s[a][c] += k[a] * missing);
                }
                outputs.extend((0..DV).map(|c| (0..DK).map(|a| q[a] * s[a][c]).sum::<f64>()));
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
            for length in [1, 2, 37, 64, 150] {
                let inputs = case(length, gate, |x| 0.5 + 0.5 * x);
                let (outputs, memories) = defined(&inputs);
                for size in [1, 2, 16, 33, 64, 1000] {
                    let (y, memory) = scan(&inputs, &empty(), size).unwrap();
                    assert!(distance(&y, &outputs) < 1e-5, "{length} by {size}");
                    assert!(distance(&memory, &memories) < 1e-5, "{length} by {size}");
                }
            }
        }
    }

    /// With equal keys and full write strength, an inverse by powers of the matrix would overflow.
    #[test]
    fn keys_that_are_alike_lose_no_digits() {
        let mut inputs = case(128, |_| 0.0, |_| 1.0);
        let first = inputs.k.slice_axis(2, 0, 1).unwrap();
        inputs.k = first.broadcast_to(&[1, H as i32, 128, DK as i32]).unwrap();
        inputs.k = inputs.k.contiguous().unwrap();
        let (outputs, _) = defined(&inputs);
        let (y, _) = scan(&inputs, &empty(), 64).unwrap();
        assert!(distance(&y, &outputs) < 1e-5);
    }

    #[test]
    fn two_thousand_positions_by_chunks_are_those_by_steps() {
        let inputs = case(2000, |x| -0.05 * x.abs(), |x| 0.5 + 0.5 * x);
        let (y, memory) = scan(&inputs, &empty(), 64).unwrap();
        let mut state = empty();
        let mut steps = Vec::new();
        for at in 0..2000 {
            let of = |a: &Array| a.slice_axis(2, at, at + 1).unwrap();
            let one = Inputs {
                q: of(&inputs.q),
                k: of(&inputs.k),
                v: of(&inputs.v),
                f: of(&inputs.f),
                b: of(&inputs.b),
            };
            let (y, after) = step(&one, &state).unwrap();
            mlx_rs_core::eval([&y, &after]).unwrap();
            steps.push(y);
            state = after;
        }
        let steps = joined(&steps, 2000).unwrap();
        assert!(y.all_close(&steps, 0.0, 1e-5).unwrap());
        assert!(memory.all_close(&state, 0.0, 1e-5).unwrap());
    }
}
