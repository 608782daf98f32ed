//! The layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): one projection, a convolution over
//! inputs, B and C, the recurrence, and a gated norm. A kernel or `ssd.rs` computes the recurrence.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result};

use super::adapter;
use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::head_norm::HeadNorm;
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::Norm;
use super::recurrence::{heads_first, over_rows, part};
use super::ssd::{Inputs, scan};
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::activation::{silu, softplus};
use crate::exec::recurrence::{self, Memory, MemoryInputs, MemoryRule};

/// The number of positions per chunk; it does not change the result.
const CHUNK: i32 = 64;

/// A Mamba-2 layer.
#[derive(Debug)]
pub struct Mamba2 {
    /// The projection of `[hidden]` to gates, inputs of the convolution, and steps.
    pub in_proj: Linear,
    /// The convolution over inputs, B and C.
    pub conv: CausalConv,
    /// Negative decay rates, `[heads]` in float32.
    pub rates: Array,
    /// Bias on the steps before their softplus, `[heads]` in float32.
    pub dt_bias: Array,
    /// The skip factor of each head (D), `[heads]` in float32.
    pub skip: Array,
    /// Factors on the output of `in_proj`, one per output (Falcon-H1).
    pub factors: Option<Array>,
    /// The norm of all heads, with the gate.
    pub norm: GatedNorm,
    /// `[heads * dim] -> [hidden]`.
    pub out_proj: Linear,
    /// The layer's sizes.
    pub shape: Mamba2Shape,
    /// The layout of the state, from [`Mamba2Shape::layout`].
    pub layout: Arc<StateLayout>,
}

/// The gate between the heads and the output projection, with an optional norm.
#[derive(Debug)]
pub enum GatedNorm {
    /// A gate without a norm.
    Gate,
    /// A gate, and a norm of each group of heads.
    Grouped {
        /// The norm of one group.
        norm: HeadNorm,
        /// The number of groups.
        groups: i32,
        /// Whether the norm is applied before the gate.
        before_gate: bool,
    },
}

impl GatedNorm {
    /// Applies gate and norm to `x` and `gate`, both `[1, T, inner]` in float32. The result has the
    /// shape of `x`.
    fn forward(&self, x: &Array, gate: &Array) -> Result<Array> {
        let differentiated = adapter::differentiated();
        match self {
            Self::Gate => silu(gate, Some(x), differentiated),
            Self::Grouped {
                norm,
                groups,
                before_gate,
            } => {
                let gate = silu(gate, None, differentiated)?;
                let normed = |x: &Array| {
                    let grouped = x.reshape(&[1, x.dim(1)?, *groups, -1])?;
                    norm.forward(&grouped, Dtype::Float32)
                };
                if *before_gate {
                    normed(x)?.multiply(&gate)
                } else {
                    normed(&x.multiply(&gate)?)
                }
            }
        }
    }
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2Shape {
    /// Number of heads.
    pub heads: i32,
    /// Elements per head.
    pub dim: i32,
    /// Elements of B, and of C, per group.
    pub state: i32,
    /// Groups of heads that share B and C; this number divides `heads`.
    pub groups: i32,
    /// The kernel width of the convolution.
    pub width: i32,
    /// The minimum and maximum step size.
    pub step_limit: (f32, f32),
}

impl Mamba2Shape {
    /// Returns the number of elements of all heads.
    pub fn inner(&self) -> i32 {
        self.heads * self.dim
    }

    /// Returns the channels of the convolution: inputs, B and C.
    pub fn channels(&self) -> i32 {
        self.inner() + 2 * self.groups * self.state
    }

    /// Returns the layout of a row's state in float32: the last inputs of the convolution, and one
    /// matrix per head.
    pub fn layout(&self) -> Arc<StateLayout> {
        StateLayout::new(
            "ssd",
            vec![
                StatePart::new("conv", &[self.width - 1, self.channels()]),
                StatePart::new("S", &[self.heads, self.state, self.dim]),
            ],
        )
    }
}

impl Mamba2Shape {
    /// The parameters of the recurrence for the kernels.
    fn memory(&self) -> Memory {
        Memory {
            rule: MemoryRule::Decay,
            heads: self.heads,
            key_heads: self.groups,
            key_dim: self.state,
            value_dim: self.dim,
            scale: 1.0,
            chunk: CHUNK,
        }
    }

    /// Computes the recurrence over `[R, L, ..]` with MLX's operations. Returns the outputs `[R, L,
    /// H, D]` and the memory after the last position.
    fn scan(&self, of: &MemoryInputs<'_>, memory: &Array) -> Result<(Array, Array)> {
        let repeats = self.heads / self.groups;
        let shared = |a: &Array| heads_first(a, [self.groups, self.state], repeats);
        let inputs = Inputs {
            q: shared(of.q)?,
            k: shared(of.k)?,
            v: heads_first(of.v, [self.heads, self.dim], 1)?,
            // [R, L, H] -> [R, H, L]
            f: of.f.swap_axes(1, 2)?,
        };
        let (y, after) = scan(&inputs, memory, CHUNK)?;
        // [R, H, L, D] -> [R, L, H, D]
        Ok((y.transpose_axes(&[0, 2, 1, 3])?, after))
    }
}

impl Mixer for Mamba2 {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let shape = &self.shape;
        let (inner, channels) = (shape.inner(), shape.channels());
        let mut wide = self.in_proj.forward_from(norm, x, None)?; // [1, T, ..]
        if let Some(factors) = &self.factors {
            wide = wide.multiply(factors)?;
        }
        let cut = |from: i32, width: i32| wide.slice_axis(-1, from, from + width);
        let gate = positions.of(&cut(0, inner)?, &lengths)?;
        // The state is float32, so the recurrence is float32, too.
        let mixed = cut(inner, channels)?.astype(Dtype::Float32)?;
        let (least, most) = shape.step_limit;
        let steps = cut(inner + channels, shape.heads)?.astype(Dtype::Float32)?;
        let steps = softplus(&steps.add(&self.dt_bias)?, adapter::differentiated())?
            .clip(Some(&Array::scalar(least)?), Some(&Array::scalar(most)?))?;
        let decay = steps.multiply(&self.rates)?;
        let outputs = over_rows(rows, layer, &self.layout, |span, state| {
            let (mixed, before) = self.conv.forward(&span.of(&mixed)?, part(&state, 0)?)?;
            let mixed = silu(&mixed, None, adapter::differentiated())?;
            let part_of = |from: i32, width: i32| mixed.slice_axis(2, from, from + width);
            let shared = shape.groups * shape.state;
            let (k, q) = (part_of(inner, shared)?, part_of(inner + shared, shared)?);
            let heads = [span.rows, span.length, shape.heads, shape.dim];
            let input = part_of(0, inner)?.reshape(&heads)?;
            let flat = [span.rows, span.length, inner];
            let written = input.multiply(&span.of(&steps)?.expand_dims(-1)?)?;
            let (v, f) = (written.reshape(&flat)?, span.of(&decay)?);
            let inputs = MemoryInputs {
                q: &q,
                k: &k,
                v: &v,
                f: &f,
                second: None,
            };
            let recurrent = [part(&state, 1)?.clone()];
            let differentiated = adapter::differentiated();
            let (y, after) = match recurrence::by_kernel(differentiated, || {
                shape.memory().scan(&inputs, &recurrent)
            })? {
                Some((y, after)) => (y, part(&after, 0)?.clone()),
                None => shape.scan(&inputs, &recurrent[0])?,
            };
            let skip = self.skip.reshape(&[shape.heads, 1])?;
            let y = y.reshape(&heads)?.add(&input.multiply(&skip)?)?;
            Ok((y.reshape(&flat)?, vec![before, after]))
        })?;
        let outputs = positions.of(&outputs, &lengths)?;
        let outputs = self.norm.forward(&outputs, &gate.astype(Dtype::Float32)?)?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.out_proj
            .forward_from(None, &outputs.astype(x.dtype())?, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
