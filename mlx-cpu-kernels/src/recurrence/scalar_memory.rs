//! The sLSTM cell (Beck et al. 2024, arXiv:2405.04517, section 2.2): a scalar memory for each
//! element, whose gates depend on the previous output of the whole head. So the positions of a head
//! are computed one after another.

use std::cell::RefCell;

use crate::isa::{Isa, compiled_for_each_isa};
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::LANES;
use crate::partition::{SharedOutput, parallel_parts};
use crate::simd::portable::vmath::{exp, softplus, tanh};
use crate::work::{Input, Work};

/// The number of panels of `LANES` columns that are summed together.
const PANELS: usize = 4;

/// An sLSTM cell over a sequence. For an element of a head with the output `y` `[dim]` before a
/// position:
///
/// ```text
/// raw = gates + y R                 of the gates i, f, z, o
/// d   = m + logsigmoid(f)
/// m'  = max(i, d)                   i alone if n is 0
/// c'  = exp(d - m') c + exp(i - m') tanh(z)
/// n'  = exp(d - m') n + exp(i - m')
/// y'  = sigmoid(o) c' / n'
/// ```
///
/// All inputs are row-contiguous float32: the gates' parts that depend on the input `[rows, length,
/// 4, heads, dim]`; `R` `[heads, dim, 4 * dim]`; and `y`, `c`, `n` and `m` `[rows, heads, dim]`.
/// The output is `y'` of all positions `[rows, length, heads, dim]`, then `y`, `c`, `n` and `m`
/// after the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalarMemory {
    /// The number of sequences.
    pub rows: usize,
    /// The number of positions per sequence.
    pub length: usize,
    /// The number of heads.
    pub heads: usize,
    /// The number of elements of a head.
    pub dim: usize,
}

/// The gates of a position, `[4, dim]`, and the state, `[4, dim]`: y, c, n and m.
#[derive(Default)]
struct Scratch {
    gates: AlignedVec,
    state: AlignedVec,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for ScalarMemory {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Self {
            rows,
            length,
            heads,
            dim,
        } = *self;
        let isa = Isa::detect();
        // SAFETY: the caller passes row-contiguous float32 that exists during the call and is not
        // written.
        let floats = |at: usize| unsafe { inputs[at].as_slice::<f32>() };
        let (gates, recurrent) = (floats(0), floats(1));
        let before = [floats(2), floats(3), floats(4), floats(5)];
        let (outputs, after) = output.split_at_mut(rows * length * heads * dim);
        let (outputs, after) = (SharedOutput::new(outputs), SharedOutput::new(after));
        let work = 4 * rows * length * heads * dim * dim;
        parallel_parts(rows * heads, work, &|parts| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.gates.resize(4 * dim);
                scratch.state.resize(4 * dim);
                for part in parts {
                    let (row, head) = (part / heads, part % heads);
                    let recurrent = &recurrent[head * 4 * dim * dim..][..4 * dim * dim];
                    for (to, from) in scratch.state.chunks_exact_mut(dim.max(1)).zip(before) {
                        to.copy_from_slice(&from[part * dim..][..dim]);
                    }
                    for position in row * length..(row + 1) * length {
                        for (gate, to) in scratch.gates.chunks_exact_mut(dim.max(1)).enumerate() {
                            let at = ((position * 4 + gate) * heads + head) * dim;
                            to.copy_from_slice(&gates[at..at + dim]);
                        }
                        advance(isa, recurrent, &mut scratch.gates, &mut scratch.state);
                        // SAFETY: no other part of the job writes this head of this row.
                        let y = unsafe { outputs.slice_mut((position * heads + head) * dim, dim) };
                        y.copy_from_slice(&scratch.state[..dim]);
                    }
                    for (i, from) in scratch.state.chunks_exact(dim.max(1)).enumerate() {
                        // SAFETY: no other part of the job writes the state of this head.
                        let to = unsafe { after.slice_mut((i * rows * heads + part) * dim, dim) };
                        to.copy_from_slice(from);
                    }
                }
            });
        });
    }

    fn outputs(&self) -> usize {
        self.rows * self.heads * self.dim * (self.length + 4)
    }
}

compiled_for_each_isa! {
    /// Advances a head by a position. `gates` and `state` are those of [`Scratch`].
    fn advance(recurrent: &[f32], gates: &mut [f32], state: &mut [f32]) = advance_with;
}

#[inline(always)]
fn advance_with(recurrent: &[f32], gates: &mut [f32], state: &mut [f32]) {
    let width = gates.len();
    let dim = width / 4;
    let (y, rest) = state.split_at_mut(dim);
    for (block, gates) in gates.chunks_mut(PANELS * LANES).enumerate() {
        add_products(y, &recurrent[block * PANELS * LANES..], width, gates);
    }
    let (c, rest) = rest.split_at_mut(dim);
    let (n, m) = rest.split_at_mut(dim);
    let (i, rest) = gates.split_at(dim);
    let (f, rest) = rest.split_at(dim);
    let (z, o) = rest.split_at(dim);
    for at in 0..dim {
        let decayed = m[at] - softplus(-f[at]);
        let greater = if i[at] > decayed { i[at] } else { decayed };
        let limit = if n[at] == 0.0 { i[at] } else { greater };
        let (take, keep) = (exp(i[at] - limit), exp(decayed - limit));
        // Before the first position, `c` and `n` are zero, and the exponent of `keep` may be
        // positive.
        let keep = if keep > 1.0 { 1.0 } else { keep };
        m[at] = limit;
        c[at] = keep * c[at] + take * tanh(z[at]);
        n[at] = keep * n[at] + take;
        y[at] = c[at] / ((1.0 + exp(-o[at])) * n[at]);
    }
}

/// Adds the products of `y` with some columns of a matrix whose rows have `width` elements.
#[inline(always)]
fn add_products(y: &[f32], columns: &[f32], width: usize, sums: &mut [f32]) {
    if let Ok(sums) = <&mut [f32; PANELS * LANES]>::try_from(&mut *sums) {
        let mut all = *sums;
        for (y, row) in y.iter().zip(columns.chunks(width)) {
            for (sum, weight) in all.iter_mut().zip(row) {
                *sum += y * weight;
            }
        }
        *sums = all;
        return;
    }
    for (y, row) in y.iter().zip(columns.chunks(width)) {
        for (sum, weight) in sums.iter_mut().zip(row) {
            *sum += y * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    fn case(of: ScalarMemory) -> [Vec<f32>; 6] {
        let width = of.heads * of.dim;
        let state = of.rows * width;
        let positive = noise(state, 5).iter().map(|x| x.abs() + 0.1).collect();
        let weights = noise(4 * width * of.dim, 2);
        [
            noise(of.rows * of.length * 4 * width, 1),
            weights.iter().map(|x| 0.3 * x).collect(),
            noise(state, 3),
            noise(state, 4),
            positive,
            noise(state, 6),
        ]
    }

    /// Computes the definition in float64. Returns the outputs, then the final state.
    fn defined(of: ScalarMemory, all: &[Vec<f32>; 6]) -> Vec<f64> {
        let ScalarMemory {
            rows,
            length,
            heads,
            dim,
        } = of;
        let [gates, recurrent, mut y, mut c, mut n, mut m] =
            (all.each_ref()).map(|a| a.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
        let mut outputs = vec![0.0; rows * length * heads * dim];
        for part in 0..rows * heads {
            let (row, head) = (part / heads, part % heads);
            for position in row * length..(row + 1) * length {
                let old = y[part * dim..(part + 1) * dim].to_vec();
                for e in 0..dim {
                    let [i, f, z, o] = [0, 1, 2, 3].map(|gate| {
                        let products = old.iter().enumerate().map(|(j, y)| {
                            y * recurrent[(head * dim + j) * 4 * dim + gate * dim + e]
                        });
                        gates[((position * 4 + gate) * heads + head) * dim + e]
                            + products.sum::<f64>()
                    });
                    let at = part * dim + e;
                    let decayed = m[at] - (-f).exp().ln_1p();
                    let limit = if n[at] == 0.0 { i } else { i.max(decayed) };
                    let keep = (decayed - limit).exp().min(1.0);
                    m[at] = limit;
                    c[at] = keep * c[at] + (i - limit).exp() * z.tanh();
                    n[at] = keep * n[at] + (i - limit).exp();
                    y[at] = c[at] / n[at] / (1.0 + (-o).exp());
                    outputs[(position * heads + head) * dim + e] = y[at];
                }
            }
        }
        for part in [y, c, n, m] {
            outputs.extend(part);
        }
        outputs
    }

    fn run(of: ScalarMemory, all: &[Vec<f32>; 6]) -> Vec<f32> {
        let inputs: Vec<Input> = all.iter().map(|a| Input::from_slice(a)).collect();
        let mut output = vec![f32::NAN; of.outputs()];
        // SAFETY: the inputs are float32 of these shapes, and exist during the call.
        unsafe { of.run(&inputs, &mut output) };
        output
    }

    #[test]
    fn cells_equal_the_definition() {
        with_each(|_| {
            for (rows, length, heads, dim) in
                [(1, 1, 1, 16), (1, 30, 4, 32), (2, 7, 3, 5), (3, 1, 2, 37)]
            {
                let of = ScalarMemory {
                    rows,
                    length,
                    heads,
                    dim,
                };
                let mut all = case(of);
                for from_nothing in [false, true] {
                    if from_nothing {
                        all[2..].iter_mut().for_each(|part| part.fill(0.0));
                    }
                    for (got, wanted) in run(of, &all).iter().zip(defined(of, &all)) {
                        let error = (f64::from(*got) - wanted).abs();
                        assert!(
                            error < 1e-5 * (1.0 + wanted.abs()),
                            "{of:?}: {got} {wanted}"
                        );
                    }
                }
            }
        });
    }

    /// A state that later segments continue must give the bits of one pass.
    #[test]
    fn segments_equal_one_pass_bit_by_bit() {
        let of = ScalarMemory {
            rows: 1,
            length: 20,
            heads: 2,
            dim: 19,
        };
        let all = case(of);
        let one_pass = run(of, &all);
        let (mut outputs, mut inputs) = (Vec::new(), all.clone());
        for (from, to) in [(0, 1), (1, 8), (8, 20)] {
            let part = ScalarMemory {
                length: to - from,
                ..of
            };
            inputs[0] = all[0][from * 4 * 38..to * 4 * 38].to_vec();
            let mut result = run(part, &inputs);
            let state = result.split_off((to - from) * 38);
            for (part, state) in inputs[2..].iter_mut().zip(state.chunks(38)) {
                *part = state.to_vec();
            }
            outputs.extend(result);
        }
        outputs.extend(inputs[2..].iter().flatten());
        assert_eq!(outputs, one_pass);
    }
}
