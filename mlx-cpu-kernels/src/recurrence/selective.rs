//! The recurrence of Mamba (Gu and Dao 2023, arXiv:2312.00752), in which each element of the state
//! has its own decay. Sixteen channels are computed together, position by position.

use std::cell::RefCell;

use crate::isa::{Isa, compiled_for_each_isa};
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::LANES;
use crate::partition::{SharedOutput, parallel_parts};
use crate::recurrence::matrix_memory::Positions;
use crate::simd::portable::vmath::{exp, softplus};
use crate::work::{Input, Work};

/// A selective state space over a sequence. For a channel with the input `x`, the step size `d`
/// before its softplus, and the state `S` of `state` elements:
///
/// ```text
/// t  = ln(1 + exp(d))
/// S' = exp(t A) S + t x B
/// y  = S' C
/// ```
///
/// All inputs are float32: the state `[rows, channels, state]` and the rates `A` `[channels,
/// state]`, row-contiguous; then, with any strides of the first two axes, `x` and `d` `[rows,
/// length, channels]`, and `B` and `C` `[rows, length, state]`. The output is `y` `[rows, length,
/// channels]`, then the final state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectiveScan {
    /// The number of sequences.
    pub rows: usize,
    /// The number of positions per sequence.
    pub length: usize,
    /// The number of channels.
    pub channels: usize,
    /// The number of elements of a channel's state.
    pub state: usize,
}

/// The rates and states of some channels, `[state, LANES]`.
#[derive(Default)]
struct Scratch {
    rates: AlignedVec,
    states: AlignedVec,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The inputs by position.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    x: Positions<'a>,
    steps: Positions<'a>,
    written: Positions<'a>,
    read: Positions<'a>,
}

impl Work for SelectiveScan {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Self {
            rows,
            length,
            channels,
            state,
        } = *self;
        let isa = Isa::detect();
        let (y, after) = output.split_at_mut(rows * length * channels);
        let (y, after) = (SharedOutput::new(y), SharedOutput::new(after));
        // SAFETY: the caller passes row-contiguous float32 that exists during the call and is not
        // written.
        let (before, rates) = unsafe { (inputs[0].as_slice::<f32>(), inputs[1].as_slice::<f32>()) };
        // SAFETY: the caller passes float32 that exists and is not written during the call.
        let of = |at: usize| unsafe { Positions::new(&inputs[at]) };
        let inputs = Inputs {
            x: of(2),
            steps: of(3),
            written: of(4),
            read: of(5),
        };
        let blocks = channels.div_ceil(LANES);
        // An exponential costs about as much as sixteen multiplications.
        let work = 16 * rows * length * channels * state;
        parallel_parts(rows * blocks, work, &|parts| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.rates.resize(state * LANES);
                scratch.states.resize(state * LANES);
                for part in parts {
                    let (row, first) = (part / blocks, part % blocks * LANES);
                    let count = LANES.min(channels - first);
                    let old = &before[(row * channels + first) * state..][..count * state];
                    to_lanes(&rates[first * state..][..count * state], &mut scratch.rates);
                    to_lanes(old, &mut scratch.states);
                    for position in 0..length {
                        let step = Step {
                            x: lanes(inputs.x.at(row, position, first, count)),
                            steps: lanes(inputs.steps.at(row, position, first, count)),
                            written: inputs.written.at(row, position, 0, state),
                            read: inputs.read.at(row, position, 0, state),
                        };
                        let sums = advance(isa, &step, &scratch.rates, &mut scratch.states);
                        let at = (row * length + position) * channels + first;
                        // SAFETY: no other part of the job writes these channels of this row.
                        let y = unsafe { y.slice_mut(at, count) };
                        y.copy_from_slice(&sums[..count]);
                    }
                    // SAFETY: no other part of the job writes the states of these channels.
                    let new =
                        unsafe { after.slice_mut((row * channels + first) * state, count * state) };
                    for (lane, new) in new.chunks_exact_mut(state.max(1)).enumerate() {
                        for (i, new) in new.iter_mut().enumerate() {
                            *new = scratch.states[i * LANES + lane];
                        }
                    }
                }
            });
        });
    }

    fn outputs(&self) -> usize {
        self.rows * self.channels * (self.length + self.state)
    }
}

/// Returns up to [`LANES`] values as lanes. The other lanes are zero.
fn lanes(values: &[f32]) -> [f32; LANES] {
    let mut all = [0.0; LANES];
    all[..values.len()].copy_from_slice(values);
    all
}

/// Transposes `[channels, state]` to `[state, LANES]`. Lanes without a channel are zero.
fn to_lanes(from: &[f32], to: &mut [f32]) {
    let state = to.len() / LANES;
    to.fill(0.0);
    for (lane, from) in from.chunks_exact(state.max(1)).enumerate() {
        for (i, value) in from.iter().enumerate() {
            to[i * LANES + lane] = *value;
        }
    }
}

/// The inputs of one position: those of each lane, and those that all lanes share.
struct Step<'a> {
    x: [f32; LANES],
    steps: [f32; LANES],
    written: &'a [f32],
    read: &'a [f32],
}

compiled_for_each_isa! {
    /// Advances the states of sixteen channels by a position, and returns their outputs.
    fn advance(step: &Step<'_>, rates: &[f32], states: &mut [f32]) -> [f32; LANES] = advance_with;
}

#[inline(always)]
fn advance_with(step: &Step<'_>, rates: &[f32], states: &mut [f32]) -> [f32; LANES] {
    let (mut sizes, mut inputs) = (step.steps, [0.0; LANES]);
    for ((input, size), x) in inputs.iter_mut().zip(&mut sizes).zip(step.x) {
        *size = softplus(*size);
        *input = *size * x;
    }
    let (rates, states) = (
        rates.as_chunks::<LANES>().0,
        states.as_chunks_mut::<LANES>().0,
    );
    let shared = step.written.iter().zip(step.read);
    let mut sums = [0.0; LANES];
    for ((rates, states), (written, read)) in rates.iter().zip(states).zip(shared) {
        for lane in 0..LANES {
            let kept = exp(sizes[lane] * rates[lane]) * states[lane];
            states[lane] = kept + inputs[lane] * written;
            sums[lane] += states[lane] * read;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, with_each};

    /// Computes the definition in float64. Returns the outputs, then the final state.
    fn defined(scan: SelectiveScan, all: &[Vec<f32>; 6]) -> Vec<f64> {
        let SelectiveScan {
            rows,
            length,
            channels,
            state,
        } = scan;
        let [before, rates, x, steps, written, read] =
            (all.each_ref()).map(|a| a.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
        let (mut states, mut y) = (before, Vec::new());
        for row in 0..rows {
            for at in (row * length..).take(length) {
                for channel in 0..channels {
                    let (step, x) = (steps[at * channels + channel], x[at * channels + channel]);
                    let step = step.exp().ln_1p();
                    let mut sum = 0.0;
                    for i in 0..state {
                        let s = &mut states[(row * channels + channel) * state + i];
                        *s = (step * rates[channel * state + i]).exp() * *s
                            + step * x * written[at * state + i];
                        sum += *s * read[at * state + i];
                    }
                    y.push(sum);
                }
            }
        }
        y.extend(states);
        y
    }

    fn run(scan: SelectiveScan, all: &[Vec<f32>; 6]) -> Vec<f32> {
        let [rows, length, channels, state] =
            [scan.rows, scan.length, scan.channels, scan.state].map(|n| i32::try_from(n).unwrap());
        let axes = [channels, state].map(|width| [rows, length, width]);
        let strides = [channels, state].map(|n| [i64::from(length * n), i64::from(n), 1]);
        let mut inputs = vec![Input::from_slice(&all[0]), Input::from_slice(&all[1])];
        for (values, i) in all[2..].iter().zip([0, 0, 1, 1]) {
            // SAFETY: values, shapes and strides outlive the inputs. All indices are within the
            // values.
            inputs.push(unsafe {
                Input::strided(values.as_ptr(), values.len(), &axes[i], &strides[i])
            });
        }
        let mut output = vec![f32::NAN; scan.outputs()];
        // SAFETY: the inputs are float32 of these shapes, and exist during the call.
        unsafe { scan.run(&inputs, &mut output) };
        output
    }

    fn case(scan: SelectiveScan) -> [Vec<f32>; 6] {
        let SelectiveScan {
            rows,
            length,
            channels,
            state,
        } = scan;
        let positive = |n: usize, seed: u32| noise(n, seed).iter().map(|v| v.abs()).collect();
        let rates: Vec<f32> = positive(channels * state, 2);
        [
            noise(rows * channels * state, 1),
            rates.iter().map(|v| -4.0 * v).collect(),
            noise(rows * length * channels, 3),
            noise(rows * length * channels, 4),
            noise(rows * length * state, 5),
            noise(rows * length * state, 6),
        ]
    }

    #[test]
    fn scans_equal_the_definition() {
        with_each(|_| {
            for (rows, length, channels, state) in [
                (1, 1, 16, 16),
                (1, 23, 40, 16),
                (2, 9, 5, 3),
                (3, 1, 33, 1),
                (1, 300, 16, 8),
            ] {
                let scan = SelectiveScan {
                    rows,
                    length,
                    channels,
                    state,
                };
                let all = case(scan);
                for (got, wanted) in run(scan, &all).iter().zip(defined(scan, &all)) {
                    assert!(
                        (f64::from(*got) - wanted).abs() < 2e-5,
                        "{scan:?}: {got} {wanted}"
                    );
                }
            }
        });
    }

    /// A state that later segments continue must give the bits of one pass.
    #[test]
    fn segments_equal_one_pass_bit_by_bit() {
        let scan = SelectiveScan {
            rows: 1,
            length: 20,
            channels: 19,
            state: 4,
        };
        let all = case(scan);
        let one_pass = run(scan, &all);
        let (mut y, mut state) = (Vec::new(), all[0].clone());
        for (from, to) in [(0, 1), (1, 8), (8, 20)] {
            let part = SelectiveScan {
                length: to - from,
                ..scan
            };
            let of = |a: &[f32], width: usize| a[from * width..to * width].to_vec();
            let inputs = [
                state,
                all[1].clone(),
                of(&all[2], 19),
                of(&all[3], 19),
                of(&all[4], 4),
                of(&all[5], 4),
            ];
            let mut result = run(part, &inputs);
            state = result.split_off((to - from) * 19);
            y.extend(result);
        }
        y.extend(state);
        assert_eq!(y, one_pass);
    }
}
