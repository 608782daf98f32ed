//! The layer of Mamba (Gu and Dao 2023, arXiv:2312.00752): a projection to inputs and gates, a
//! convolution over the inputs, and a recurrence. The recurrence's step size, input map (B) and
//! output map (C) depend on the inputs. Each channel has its own state, and each element of the
//! state has its own decay.
//!
//! ```text
//! S = exp(step A) S + (step x) B
//! y = S C + D x
//! ```

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use super::adapter;
use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use super::recurrence::{over_rows, part};
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::activation::{silu, softplus};
use crate::exec::recurrence::{self, SelectiveScan};

/// The number of positions per chunk. It limits memory, and does not change the result.
const CHUNK: i32 = 32;

/// A Mamba layer.
#[derive(Debug)]
pub struct Mamba {
    /// `[hidden] -> [2 * inner]`: inputs and gates.
    pub in_proj: Linear,
    /// The convolution over inputs.
    pub conv: CausalConv,
    /// `[inner] -> [rank + 2 * state]`: the low-rank step, B and C.
    pub x_proj: Linear,
    /// Norms of the low-rank step, B and C (Falcon-Mamba, Jamba).
    pub norms: Option<[Norm; 3]>,
    /// `[rank] -> [inner]`: maps the low-rank step to the step of each channel.
    pub dt_proj: Linear,
    /// Negative decay rates, `[inner, state]` in float32.
    pub rates: Array,
    /// The skip factor of each channel (D), `[inner]` in float32.
    pub skip: Array,
    /// `[inner] -> [hidden]`.
    pub out_proj: Linear,
    /// The layer's sizes.
    pub shape: MambaShape,
    /// The layout of the state, from [`MambaShape::layout`].
    pub layout: Arc<StateLayout>,
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// Number of channels.
    pub inner: i32,
    /// Elements in the state of one channel.
    pub state: i32,
    /// Elements of the low-rank step.
    pub rank: i32,
    /// The kernel width of the convolution.
    pub width: i32,
}

impl MambaShape {
    /// Returns the layout of a row's state in float32: the last inputs of the convolution, and the
    /// state of each channel.
    pub fn layout(&self) -> Arc<StateLayout> {
        StateLayout::new(
            "selective",
            vec![
                StatePart::new("conv", &[self.width - 1, self.inner]),
                StatePart::new("S", &[self.inner, self.state]),
            ],
        )
    }
}

/// The inputs of the recurrence for `R` rows and `L` positions, in float32.
#[derive(Debug, Clone)]
struct Inputs {
    /// `[R, L, inner]`.
    x: Array,
    /// Step sizes before their softplus, `[R, L, inner]`.
    steps: Array,
    /// The map from inputs to the state (B), `[R, L, state]`.
    written: Array,
    /// The map from the state to outputs (C), `[R, L, state]`.
    read: Array,
}

impl Inputs {
    /// Returns positions `from..to`.
    fn part(&self, from: i32, to: i32) -> Result<Self> {
        Ok(Self {
            x: self.x.slice_axis(1, from, to)?,
            steps: self.steps.slice_axis(1, from, to)?,
            written: self.written.slice_axis(1, from, to)?,
            read: self.read.slice_axis(1, from, to)?,
        })
    }
}

/// Computes the recurrence from the state `before` `[R, inner, state]`, in chunks of `size`
/// positions. Returns the outputs `[R, L, inner]` without the skip term, and the state after the
/// last position.
fn scan(inputs: &Inputs, rates: &Array, before: &Array, size: i32) -> Result<(Array, Array)> {
    let length = inputs.x.dim(1)?;
    let mut state = before.clone();
    let mut outputs = Vec::new();
    for from in (0..length).step_by(size.max(1).unsigned_abs() as usize) {
        let chunk = inputs.part(from, (from + size).min(length))?;
        let (y, after) = scan_chunk(&chunk, rates, &state)?;
        state = after;
        outputs.push(y);
    }
    match outputs.as_slice() {
        [one] => Ok((one.clone(), state)),
        several => Ok((concatenate(&several.iter().collect::<Vec<_>>(), 1)?, state)),
    }
}

/// Computes [`scan`] for one chunk. Each position's state is a linear map of the state before the
/// chunk. A parallel prefix scan composes these maps at distances `1, 2, 4, ..` (Hillis and Steele
/// 1986).
fn scan_chunk(inputs: &Inputs, rates: &Array, before: &Array) -> Result<(Array, Array)> {
    let length = inputs.x.dim(1)?;
    let steps = softplus(&inputs.steps, adapter::differentiated())?;
    let steps = steps.expand_dims(-1)?; // [R, L, inner, 1]
    let mut kept = steps.multiply(rates)?.exp()?; // [R, L, inner, state]
    let mut added =
        (steps.multiply(&inputs.x.expand_dims(-1)?)?).multiply(&inputs.written.expand_dims(2)?)?;
    let mut distance = 1;
    while distance < length {
        let early = |a: &Array| a.slice_axis(1, 0, distance);
        let late = |a: &Array| a.slice_axis(1, distance, length);
        let before = |a: &Array| a.slice_axis(1, 0, length - distance);
        let sums = late(&added)?.add(&late(&kept)?.multiply(&before(&added)?)?)?;
        let products = late(&kept)?.multiply(&before(&kept)?)?;
        added = concatenate(&[&early(&added)?, &sums], 1)?;
        kept = concatenate(&[&early(&kept)?, &products], 1)?;
        distance *= 2;
    }
    // [R, L, inner, state]
    let states = kept.multiply(&before.expand_dims(1)?)?.add(&added)?;
    let after = states.slice_axis(1, length - 1, length)?.squeeze_axis(1)?;
    let y = states.matmul(&inputs.read.expand_dims(-1)?)?;
    Ok((y.squeeze_axis(-1)?, after))
}

impl Mixer for Mamba {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let MambaShape {
            inner, state, rank, ..
        } = self.shape;
        let wide = self.in_proj.forward_from(norm, x, None)?; // [1, T, 2 * inner]
        // The state is float32, so the recurrence is float32, too.
        let mixed = wide.slice_axis(-1, 0, inner)?.astype(Dtype::Float32)?;
        let gate = positions.of(&wide.slice_axis(-1, inner, 2 * inner)?, &lengths)?;
        let outputs = over_rows(rows, layer, &self.layout, |span, before| {
            let (mixed, last) = self.conv.forward(&span.of(&mixed)?, part(&before, 0)?)?;
            let mixed = silu(&mixed, None, adapter::differentiated())?;
            let maps = self.x_proj.forward(&mixed.astype(x.dtype())?)?;
            let map = |at: usize, from: i32, width: i32| {
                let map = maps.slice_axis(-1, from, from + width)?;
                through(self.norms.as_ref().map(|norms| &norms[at]), &map)
            };
            let steps = self.dt_proj.forward(&map(0, 0, rank)?)?;
            let inputs = Inputs {
                steps: steps.astype(Dtype::Float32)?,
                written: map(1, rank, state)?.astype(Dtype::Float32)?,
                read: map(2, rank + state, state)?.astype(Dtype::Float32)?,
                x: mixed,
            };
            let before = part(&before, 1)?;
            let positions = SelectiveScan {
                x: &inputs.x,
                steps: &inputs.steps,
                rates: &self.rates,
                written: &inputs.written,
                read: &inputs.read,
            };
            let differentiated = adapter::differentiated();
            let on_kernels = recurrence::by_kernel(differentiated, || positions.scan(before))?;
            let (y, after) = match on_kernels {
                Some(outputs) => outputs,
                None => scan(&inputs, &self.rates, before, CHUNK)?,
            };
            let y = y.add(&inputs.x.multiply(&self.skip)?)?;
            Ok((y, vec![last, after]))
        })?;
        let outputs = positions.of(&outputs, &lengths)?;
        let gate = gate.astype(Dtype::Float32)?;
        let outputs = silu(&gate, Some(&outputs), adapter::differentiated())?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.out_proj
            .forward_from(None, &outputs.astype(x.dtype())?, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INNER: usize = 3;
    const STATE: usize = 2;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
        (0..n).map(value).collect()
    }

    /// Computes the definition in float64. Returns the outputs and the last state.
    fn defined(length: usize, all: &[Vec<f32>; 6]) -> (Vec<f64>, Vec<f64>) {
        let [x, steps, written, read, rates, before] = all
            .each_ref()
            .map(|a| a.iter().map(|v| f64::from(*v)).collect::<Vec<_>>());
        let mut state = before;
        let mut outputs = Vec::new();
        for at in 0..length {
            for channel in 0..INNER {
                let (step, x) = (steps[at * INNER + channel], x[at * INNER + channel]);
                let mut y = 0.0;
                for i in 0..STATE {
                    let s = &mut state[channel * STATE + i];
                    let step = step.exp().ln_1p();
                    let decay = (step * rates[channel * STATE + i]).exp();
                    *s = decay * *s + step * x * written[at * STATE + i];
                    y += *s * read[at * STATE + i];
                }
                outputs.push(y);
            }
        }
        (outputs, state)
    }

    #[test]
    fn chunks_of_any_size_equal_the_definition() {
        for length in [1usize, 2, 5, 16, 23] {
            let all = [
                numbers(length * INNER, 1),
                numbers(length * INNER, 2),
                numbers(length * STATE, 3),
                numbers(length * STATE, 4),
                numbers(INNER * STATE, 5).iter().map(|v| -v.abs()).collect(),
                numbers(INNER * STATE, 6),
            ];
            let array = |at: usize, shape: &[usize]| {
                let shape: Vec<i32> = shape.iter().map(|d| *d as i32).collect();
                Array::from_slice(&all[at], &shape).unwrap()
            };
            let inputs = Inputs {
                x: array(0, &[1, length, INNER]),
                steps: array(1, &[1, length, INNER]),
                written: array(2, &[1, length, STATE]),
                read: array(3, &[1, length, STATE]),
            };
            let (rates, before) = (array(4, &[INNER, STATE]), array(5, &[1, INNER, STATE]));
            let (outputs, state) = defined(length, &all);
            for size in [1, 4, 7, 64] {
                let (y, after) = scan(&inputs, &rates, &before, size).unwrap();
                for (got, expected) in [(y, &outputs), (after, &state)] {
                    let got = got.to_vec::<f32>().unwrap();
                    assert_eq!(got.len(), expected.len());
                    for (got, expected) in got.iter().zip(expected) {
                        assert!(
                            (f64::from(*got) - expected).abs() < 1e-5,
                            "{length} by {size}: {got} {expected}"
                        );
                    }
                }
            }
        }
    }
}
