//! A matrix memory whose rows have separate forget gates, and whose updates have rank one: Kimi
//! Delta Attention (Kimi Team 2025, arXiv:2510.26692) and RWKV-7 (Peng et al. 2025,
//! arXiv:2503.14456). Positions are computed one after another. So the result of a sequence is
//! bitwise the same, however the sequence is divided into segments.

use std::cell::RefCell;

use crate::isa::{Isa, compiled_for_each_isa};
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::LANES;
use crate::partition::{SharedOutput, parallel_parts};
use crate::pool;
use crate::recurrence::matrix_memory::Positions;
use crate::simd::portable::vmath::exp;
use crate::work::{Input, Work};

/// A matrix memory over a sequence. For a head with the memory `S` of `[key_dim, value_dim]`:
///
/// ```text
/// u  = a S
/// S' = diag(exp(f)) S + b^T u + k^T v
/// y  = q S'
/// ```
///
/// All inputs are float32: the memory `[rows, heads, key_dim, value_dim]`, row-contiguous; then,
/// with any strides of the first two axes, `q`, `k`, `f` and `a` `[rows, length, heads * key_dim]`
/// and `v` `[rows, length, heads * value_dim]`. With `writes_apart`, `b` follows, in the shape of
/// `k`; otherwise `b` is `k`. The output is `y` `[rows, length, heads * value_dim]`, then the final
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiagonalMemory {
    /// The number of sequences.
    pub rows: usize,
    /// The number of positions per sequence.
    pub length: usize,
    /// The number of heads.
    pub heads: usize,
    /// The number of elements of a key.
    pub key_dim: usize,
    /// The number of elements of a value.
    pub value_dim: usize,
    /// Whether the inputs have `b`.
    pub writes_apart: bool,
}

/// The memory of some columns, `[panels, key_dim, LANES]`, and the factors on its rows.
#[derive(Default)]
struct Scratch {
    memory: AlignedVec,
    kept: AlignedVec,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The inputs by position.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: Positions<'a>,
    k: Positions<'a>,
    f: Positions<'a>,
    a: Positions<'a>,
    v: Positions<'a>,
    b: Option<Positions<'a>>,
}

impl Work for DiagonalMemory {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Self {
            rows,
            length,
            heads,
            key_dim,
            value_dim,
            ..
        } = *self;
        let isa = Isa::detect();
        let (y, after) = output.split_at_mut(rows * length * heads * value_dim);
        let (y, after) = (SharedOutput::new(y), SharedOutput::new(after));
        // SAFETY: the caller passes row-contiguous float32 that exists during the call and is not
        // written.
        let before = unsafe { inputs[0].as_slice::<f32>() };
        // SAFETY: the caller passes float32 that exists and is not written during the call.
        let of = |input: &Input| unsafe { Positions::new(input) };
        let inputs = Inputs {
            q: of(&inputs[1]),
            k: of(&inputs[2]),
            f: of(&inputs[3]),
            a: of(&inputs[4]),
            v: of(&inputs[5]),
            b: inputs.get(6).map(of),
        };
        let panels = value_dim.div_ceil(LANES);
        // The columns of a head are independent, and each part computes the factors again.
        let splits = match (pool::pool().threads(), (rows * heads).max(1)) {
            (1, _) => 1,
            (threads, heads) => (2 * threads).div_ceil(heads).min(panels).max(1),
        };
        let work = 4 * rows * length * heads * key_dim * value_dim;
        parallel_parts(rows * heads * splits, work, &|parts| {
            SCRATCH.with_borrow_mut(|scratch| {
                for part in parts {
                    let (head, split) = (part / splits, part % splits);
                    let own = panels * split / splits..panels * (split + 1) / splits;
                    let first = own.start * LANES;
                    let columns = Columns {
                        row: head / heads,
                        head: head % heads,
                        first,
                        count: (own.end * LANES).min(value_dim) - first,
                    };
                    self.run_columns(isa, &inputs, columns, before, (&y, &after), scratch);
                }
            });
        });
    }

    fn outputs(&self) -> usize {
        self.rows * self.heads * self.value_dim * (self.length + self.key_dim)
    }
}

/// Some columns of a head's memory.
#[derive(Clone, Copy)]
struct Columns {
    row: usize,
    head: usize,
    first: usize,
    count: usize,
}

impl DiagonalMemory {
    fn run_columns<'a>(
        &self,
        isa: Isa,
        inputs: &Inputs<'a>,
        columns: Columns,
        before: &[f32],
        (y, after): (&SharedOutput, &SharedOutput),
        scratch: &mut Scratch,
    ) {
        let Self {
            length,
            heads,
            key_dim,
            value_dim,
            ..
        } = *self;
        let Columns {
            row,
            head,
            first,
            count,
        } = columns;
        let panels = count.div_ceil(LANES);
        scratch.memory.resize(panels * key_dim * LANES);
        scratch.kept.resize(key_dim);
        let start = (row * heads + head) * key_dim * value_dim + first;
        // In the last panel, the lanes after the last column stay zero.
        scratch.memory.fill(0.0);
        for channel in 0..key_dim {
            let from = &before[start + channel * value_dim..][..count];
            for (panel, from) in from.chunks(LANES).enumerate() {
                let at = (panel * key_dim + channel) * LANES;
                scratch.memory[at..at + from.len()].copy_from_slice(from);
            }
        }
        for position in 0..length {
            let key = |input: Positions<'a>| input.at(row, position, head * key_dim, key_dim);
            let step = Step {
                q: key(inputs.q),
                k: key(inputs.k),
                f: key(inputs.f),
                a: key(inputs.a),
                b: inputs.b.map(key),
                v: inputs.v.at(row, position, head * value_dim + first, count),
            };
            let at = ((row * length + position) * heads + head) * value_dim + first;
            // SAFETY: no other part of the job writes these columns of this head and row.
            let y = unsafe { y.slice_mut(at, count) };
            advance(isa, &step, &mut scratch.kept, &mut scratch.memory, y);
        }
        for channel in 0..key_dim {
            // SAFETY: no other part of the job writes these columns of this head.
            let to = unsafe { after.slice_mut(start + channel * value_dim, count) };
            for (panel, to) in to.chunks_mut(LANES).enumerate() {
                let at = (panel * key_dim + channel) * LANES;
                to.copy_from_slice(&scratch.memory[at..at + to.len()]);
            }
        }
    }
}

/// The inputs of one position of one head.
struct Step<'a> {
    q: &'a [f32],
    k: &'a [f32],
    f: &'a [f32],
    a: &'a [f32],
    b: Option<&'a [f32]>,
    v: &'a [f32],
}

compiled_for_each_isa! {
    /// Advances the memory `[panels, key_dim, LANES]` by a position. `y` gets the outputs, and
    /// `kept` the factors on the memory's rows.
    fn advance(step: &Step<'_>, kept: &mut [f32], memory: &mut [f32], y: &mut [f32]) = advance_with;
}

#[inline(always)]
fn advance_with(step: &Step<'_>, kept: &mut [f32], memory: &mut [f32], y: &mut [f32]) {
    for (kept, f) in kept.iter_mut().zip(step.f) {
        *kept = exp(*f);
    }
    let panels = memory.chunks_exact_mut(kept.len() * LANES);
    let columns = step.v.chunks(LANES).zip(y.chunks_mut(LANES));
    for (memory, (v, y)) in panels.zip(columns) {
        let memory = memory.as_chunks_mut::<LANES>().0;
        let mut value = [0.0; LANES];
        value[..v.len()].copy_from_slice(v);
        let read = weighted(step.a, memory);
        let sums = match step.b {
            Some(b) => {
                let write = |channel: usize, lane: usize| {
                    b[channel] * read[lane] + step.k[channel] * value[lane]
                };
                update(step.q, kept, memory, write)
            }
            None => {
                for (value, read) in value.iter_mut().zip(read) {
                    *value += read;
                }
                let write = |channel: usize, lane: usize| step.k[channel] * value[lane];
                update(step.q, kept, memory, write)
            }
        };
        y.copy_from_slice(&sums[..y.len()]);
    }
}

/// `sum_i weights[i] * memory[i]`. Four partial sums shorten the chain of dependent additions.
#[inline(always)]
fn weighted(weights: &[f32], memory: &[[f32; LANES]]) -> [f32; LANES] {
    let mut sums = [[0.0; LANES]; 4];
    for (weights, rows) in weights.chunks(4).zip(memory.chunks(4)) {
        for ((weight, row), sum) in weights.iter().zip(rows).zip(&mut sums) {
            for lane in 0..LANES {
                sum[lane] += weight * row[lane];
            }
        }
    }
    let mut total = [0.0; LANES];
    for lane in 0..LANES {
        total[lane] = (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]);
    }
    total
}

/// Adds `write(channel, lane)` to the memory after its decay. Returns `sum_i q[i] * memory[i]` of
/// the new rows.
#[inline(always)]
fn update(
    q: &[f32],
    kept: &[f32],
    memory: &mut [[f32; LANES]],
    write: impl Fn(usize, usize) -> f32,
) -> [f32; LANES] {
    let mut sums = [[0.0; LANES]; 2];
    for (channel, ((row, kept), q)) in memory.iter_mut().zip(kept).zip(q).enumerate() {
        for lane in 0..LANES {
            row[lane] = kept * row[lane] + write(channel, lane);
            sums[channel % 2][lane] += q * row[lane];
        }
    }
    let mut total = [0.0; LANES];
    for lane in 0..LANES {
        total[lane] = sums[0][lane] + sums[1][lane];
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    /// The memory, then `q`, `k`, `f`, `a`, `v` and `b`.
    fn case(of: DiagonalMemory) -> [Vec<f32>; 7] {
        let keys = of.rows * of.length * of.heads * of.key_dim;
        let values = of.rows * of.length * of.heads * of.value_dim;
        let small = |seed: u32| noise(keys, seed).iter().map(|x| 0.3 * x).collect();
        [
            noise(of.rows * of.heads * of.key_dim * of.value_dim, 1),
            noise(keys, 2),
            small(3),
            noise(keys, 4).iter().map(|x| -2.0 * x.abs()).collect(),
            small(5),
            noise(values, 6),
            small(7),
        ]
    }

    /// Computes the definition in float64. Returns the outputs, then the final memory.
    fn defined(of: DiagonalMemory, all: &[Vec<f32>; 7]) -> Vec<f64> {
        let DiagonalMemory {
            rows,
            length,
            heads,
            key_dim,
            value_dim,
            writes_apart,
        } = of;
        let [mut memory, q, k, f, a, v, b] =
            (all.each_ref()).map(|a| a.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
        let b = if writes_apart { b } else { k.clone() };
        let mut y = vec![0.0; rows * length * heads * value_dim];
        for head in 0..rows * heads {
            let s = &mut memory[head * key_dim * value_dim..][..key_dim * value_dim];
            for position in 0..length {
                let at = (head / heads * length + position) * heads + head % heads;
                let (keys, values) = (at * key_dim, at * value_dim);
                for column in 0..value_dim {
                    let cell = |channel: usize| channel * value_dim + column;
                    let read: f64 = (0..key_dim).map(|c| a[keys + c] * s[cell(c)]).sum();
                    for c in 0..key_dim {
                        s[cell(c)] = s[cell(c)] * f[keys + c].exp()
                            + b[keys + c] * read
                            + k[keys + c] * v[values + column];
                        y[values + column] += q[keys + c] * s[cell(c)];
                    }
                }
            }
        }
        y.extend(memory);
        y
    }

    fn run(of: DiagonalMemory, all: &[Vec<f32>; 7]) -> Vec<f32> {
        let [rows, length, heads, key_dim, value_dim] =
            [of.rows, of.length, of.heads, of.key_dim, of.value_dim]
                .map(|n| i32::try_from(n).unwrap());
        let axes = [key_dim, value_dim].map(|width| [rows, length, heads * width]);
        let strides = axes.map(|[_, length, width]| [i64::from(length * width), width.into(), 1]);
        let mut inputs = vec![Input::from_slice(&all[0])];
        for (values, i) in all[1..].iter().zip([0, 0, 0, 0, 1, 0]) {
            // SAFETY: values, shapes and strides outlive the inputs. All indices are within the
            // values.
            inputs.push(unsafe {
                Input::strided(values.as_ptr(), values.len(), &axes[i], &strides[i])
            });
        }
        if !of.writes_apart {
            inputs.pop();
        }
        let mut output = vec![f32::NAN; of.outputs()];
        // SAFETY: the inputs are float32 of these shapes, and exist during the call.
        unsafe { of.run(&inputs, &mut output) };
        output
    }

    #[test]
    fn memories_equal_the_definition() {
        with_each(|_| {
            for (rows, length, heads, key_dim, value_dim) in [
                (1, 1, 1, 16, 16),
                (1, 20, 2, 64, 64),
                (2, 9, 3, 5, 21),
                (3, 1, 2, 33, 1),
                (1, 300, 1, 8, 40),
            ] {
                for writes_apart in [false, true] {
                    let of = DiagonalMemory {
                        rows,
                        length,
                        heads,
                        key_dim,
                        value_dim,
                        writes_apart,
                    };
                    let all = case(of);
                    let wanted = defined(of, &all);
                    let largest = wanted.iter().fold(1.0f64, |n, x| n.max(x.abs()));
                    for (got, wanted) in run(of, &all).iter().zip(wanted) {
                        let error = (f64::from(*got) - wanted).abs();
                        assert!(error < 2e-5 * largest, "{of:?}: {got} {wanted}");
                    }
                }
            }
        });
    }

    /// A memory that later segments continue must give the bits of one pass.
    #[test]
    fn segments_equal_one_pass_bit_by_bit() {
        let of = DiagonalMemory {
            rows: 1,
            length: 20,
            heads: 2,
            key_dim: 6,
            value_dim: 19,
            writes_apart: true,
        };
        let all = case(of);
        let one_pass = run(of, &all);
        let (mut y, mut memory) = (Vec::new(), all[0].clone());
        for (from, to) in [(0, 1), (1, 8), (8, 20)] {
            let part = DiagonalMemory {
                length: to - from,
                ..of
            };
            let mut inputs = all.clone();
            inputs[0] = memory;
            for (values, width) in inputs[1..].iter_mut().zip([12, 12, 12, 12, 38, 12]) {
                *values = values[from * width..to * width].to_vec();
            }
            let mut result = run(part, &inputs);
            memory = result.split_off((to - from) * 38);
            y.extend(result);
        }
        y.extend(memory);
        assert_eq!(y, one_pass);
    }
}
