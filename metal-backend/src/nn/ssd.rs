//! The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a matrix memory with a forget
//! gate. It runs as single steps or over chunks of positions, with equal results. This file uses
//! plain float32 operations; `mamba2.rs` has projections, convolution and norm.
//!
//! ```text
//! S = exp(f) S + k^T v
//! y = q S
//! ```
//!
//! In the paper's notation, `q` is C, `k` is B, `v` is `step * x`, and `f` is `step * A`.

use mlx_rs_core::{Array, Result, stack};

use super::chunks::{cut, decay};

/// The inputs of the recurrence: `R` rows, `H` heads, `L` positions.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// The queries that read the memory, `[R, H, L, N]`.
    pub q: Array,
    /// The keys under which values are written, `[R, H, L, N]`.
    pub k: Array,
    /// The values, `[R, H, L, D]`.
    pub v: Array,
    /// Logarithms of the forget gates, at most 0, `[R, H, L]`.
    pub f: Array,
}

/// Computes one step (`L` is 1). Returns the output `[R, H, 1, D]` and the memory `[R, H, N, D]`
/// after the step.
pub fn step(inputs: &Inputs, memory: &Array) -> Result<(Array, Array)> {
    let Inputs { q, k, v, f } = inputs;
    let decayed = memory.multiply(&f.exp()?.expand_dims(-1)?)?;
    let memory = decayed.add(&k.swap_axes(-1, -2)?.multiply(v)?)?;
    Ok((q.matmul(&memory)?, memory))
}

/// Computes any number of positions, in chunks of `size`; a single position uses [`step`]. Returns
/// the outputs `[R, H, L, D]` and the memory `[R, H, N, D]` after the last position.
pub fn scan(inputs: &Inputs, memory: &Array, size: i32) -> Result<(Array, Array)> {
    let length = inputs.f.dim(-1)?;
    if length == 1 {
        return step(inputs, memory);
    }
    let size = size.clamp(1, length);
    let count = (length + size - 1) / size;
    let cut = |a: &Array| cut(a, size, count);
    let (q, k, v, f) = (
        cut(&inputs.q)?,
        cut(&inputs.k)?,
        cut(&inputs.v)?,
        cut(&inputs.f)?,
    );
    let decay = decay(&f)?; // [R, H, N, C, C]
    let turned = k.swap_axes(-1, -2)?;
    let within = q.matmul(&turned)?.multiply(&decay)?.matmul(&v)?;
    let left = f.cumsum(-1, false, true)?.exp()?.expand_dims(-1)?; // [R, H, N, C, 1]
    let ends = decay.slice_axis(-2, size - 1, size)?; // [R, H, N, 1, C]
    let written = turned.multiply(&ends)?.matmul(&v)?;
    let keep = left.slice_axis(-2, size - 1, size)?; // [R, H, N, 1, 1]
    let mut memory = memory.clone();
    let mut before = Vec::new();
    for at in 0..count {
        let of = |a: &Array| a.slice_axis(2, at, at + 1)?.squeeze_axis(2);
        before.push(memory.clone());
        memory = memory.multiply(&of(&keep)?)?.add(&of(&written)?)?;
    }
    let before = stack(&before.iter().collect::<Vec<_>>(), 2)?;
    let y = within.add(&q.multiply(&left)?.matmul(&before)?)?;
    let shape = y.shape().to_vec();
    let flat = y.reshape(&[shape[0], shape[1], count * size, -1])?;
    Ok((flat.slice_axis(2, 0, length)?, memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::chunks::test_support::numbers;
    use mlx_rs_core::{Dtype, concatenate, zeros};

    const H: usize = 2;
    const N: usize = 5;
    const D: usize = 3;

    fn case(length: usize, gate: fn(f32) -> f32) -> Inputs {
        let wide = |dim: usize, seed: u64| {
            let shape = [1, H as i32, length as i32, dim as i32];
            Array::from_slice(&numbers(H * length * dim, seed), &shape).unwrap()
        };
        let gates: Vec<f32> = numbers(H * length, 4).into_iter().map(gate).collect();
        Inputs {
            q: wide(N, 1),
            k: wide(N, 2),
            v: wide(D, 3),
            f: Array::from_slice(&gates, &[1, H as i32, length as i32]).unwrap(),
        }
    }

    fn empty() -> Array {
        zeros(&[1, H as i32, N as i32, D as i32], Dtype::Float32).unwrap()
    }

    /// Computes the definition in float64. Returns the outputs `[1, H, L, D]`, the effect of a
    /// relative rounding error of 1e-6 on each output, and the memory.
    fn defined(inputs: &Inputs) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let wide = |a: &Array| -> Vec<f64> {
            let all = a.to_vec::<f32>().unwrap();
            all.into_iter().map(f64::from).collect()
        };
        let [q, k, v, f] = [&inputs.q, &inputs.k, &inputs.v, &inputs.f].map(wide);
        let length = f.len() / H;
        let (mut outputs, mut unsure, mut memories) = (Vec::new(), Vec::new(), Vec::new());
        for head in 0..H {
            let (mut s, mut s_abs) = ([[0.0f64; D]; N], [[0.0f64; D]; N]);
            for step in 0..length {
                let t = head * length + step;
                let (q, k) = (&q[t * N..(t + 1) * N], &k[t * N..(t + 1) * N]);
                for (a, c) in (0..N).flat_map(|a| (0..D).map(move |c| (a, c))) {
                    let new = k[a] * v[t * D + c];
                    s[a][c] = s[a][c] * f[t].exp() + new;
                    s_abs[a][c] = s_abs[a][c] * f[t].exp() + new.abs();
                }
                for c in 0..D {
                    outputs.push((0..N).map(|a| q[a] * s[a][c]).sum::<f64>());
                    unsure.push((0..N).map(|a| q[a].abs() * s_abs[a][c]).sum::<f64>() + 1.0);
                }
            }
            memories.extend(s.into_iter().flatten());
        }
        (outputs, unsure, memories)
    }

    #[test]
    fn chunks_of_any_length_and_steps_are_the_definition() {
        let gates: [fn(f32) -> f32; 4] =
            [|x| -0.1 * x.abs(), |x| -20.0 * x.abs(), |_| 0.0, |_| -200.0];
        for gate in gates {
            for length in [1, 2, 37, 64, 150] {
                let inputs = case(length, gate);
                let (outputs, unsure, memories) = defined(&inputs);
                for size in [1, 2, 16, 33, 64, 1000] {
                    let (y, memory) = scan(&inputs, &empty(), size).unwrap();
                    let y = y.to_vec::<f32>().unwrap();
                    assert_eq!(y.len(), outputs.len());
                    for ((&y, &o), &u) in y.iter().zip(&outputs).zip(&unsure) {
                        assert!((f64::from(y) - o).abs() < 2e-6 * u, "{length} by {size}");
                    }
                    let memory = memory.to_vec::<f32>().unwrap();
                    for (&m, &e) in memory.iter().zip(&memories) {
                        assert!((f64::from(m) - e).abs() < 5e-5, "{length} by {size}");
                    }
                }
            }
        }
    }

    #[test]
    fn two_thousand_positions_by_chunks_are_those_by_steps() {
        let inputs = case(2000, |x| -0.05 - 0.2 * x.abs());
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
            };
            let (y, after) = step(&one, &state).unwrap();
            mlx_rs_core::eval([&y, &after]).unwrap();
            steps.push(y);
            state = after;
        }
        let steps = concatenate(&steps.iter().collect::<Vec<_>>(), 2).unwrap();
        assert!(y.all_close(&steps, 0.0, 1e-5).unwrap());
        assert!(memory.all_close(&state, 0.0, 1e-5).unwrap());
    }
}
