//! The gated delta net (Yang et al. 2024, arXiv:2412.06464; as in Qwen3-Next): projections, a
//! convolution over queries, keys and values, the delta rule, and a gated norm of each head. A
//! kernel or `delta_rule.rs` computes the delta rule.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use super::adapter;
use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::delta_rule::{Inputs, scan};
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use super::recurrence::{heads_first, over_rows, part};
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::activation::{sigmoid, silu, softplus};
use crate::exec::recurrence::{self, Memory, MemoryInputs, MemoryRule};

/// The number of positions per chunk; it does not change the result.
const CHUNK: i32 = 64;

/// The number added to the sum of squares when queries and keys are normalized.
const EPS: f32 = 1e-6;

/// A gated delta net layer.
#[derive(Debug)]
pub struct GatedDelta {
    /// The input projections.
    pub projections: Projections,
    /// The convolution over all channels of queries, keys and values.
    pub conv: CausalConv,
    /// Negative decay rates, `[v_heads]` in float32.
    pub rates: Array,
    /// Bias on the forget gate before its softplus, `[v_heads]`.
    pub dt_bias: Array,
    /// The norm of each head's output.
    pub norm: Norm,
    /// `[v_heads * v_dim] -> [hidden]`.
    pub out_proj: Linear,
    /// The layer's sizes.
    pub shape: GatedDeltaShape,
    /// The layout of the state, from [`GatedDeltaShape::layout`].
    pub layout: Arc<StateLayout>,
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatedDeltaShape {
    /// Heads of queries and keys.
    pub k_heads: i32,
    /// Heads of values, a multiple of `k_heads`.
    pub v_heads: i32,
    /// Elements per head of queries and of keys.
    pub k_dim: i32,
    /// Elements per head of values.
    pub v_dim: i32,
    /// The kernel width of the convolution.
    pub width: i32,
    /// Whether value head `i` uses key head `i % k_heads`. Otherwise, adjacent value heads share
    /// one.
    pub tiled: bool,
}

impl GatedDeltaShape {
    /// Returns the number of elements of all query heads, which equals that of all key heads.
    pub fn keys(&self) -> i32 {
        self.k_heads * self.k_dim
    }

    /// Returns the number of elements of all value heads.
    pub fn values(&self) -> i32 {
        self.v_heads * self.v_dim
    }

    /// Returns the channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> i32 {
        2 * self.keys() + self.values()
    }

    /// Returns the layout of a row's state, in float32: the last inputs of the convolution, and one
    /// matrix per value head.
    pub fn layout(&self) -> Arc<StateLayout> {
        let matrix = [self.v_heads, self.k_dim, self.v_dim];
        StateLayout::new(
            "gated_delta",
            vec![
                StatePart::new("conv", &[self.width - 1, self.channels()]),
                StatePart::new("S", &matrix),
            ],
        )
    }
}

impl GatedDeltaShape {
    /// Returns the number of query and key heads that the delta rule receives. With tiled heads,
    /// there is one per value head, because the kernels can share a key head only between adjacent
    /// value heads.
    fn rule_heads(&self) -> i32 {
        match self.tiled {
            true => self.v_heads,
            false => self.k_heads,
        }
    }

    /// The parameters of the delta rule for the kernels.
    fn memory(&self) -> Memory {
        Memory {
            rule: MemoryRule::Delta,
            heads: self.v_heads,
            key_heads: self.rule_heads(),
            key_dim: self.k_dim,
            value_dim: self.v_dim,
            scale: (self.k_dim as f32).powf(-0.5),
            chunk: CHUNK,
        }
    }

    /// Computes the delta rule over `[R, L, ..]` with write strengths `b`, by MLX's operations.
    /// Returns the outputs `[R, L, H, DV]` and the memory after the last position.
    fn scan(&self, of: &MemoryInputs<'_>, b: &Array, memory: &Array) -> Result<(Array, Array)> {
        let heads = self.rule_heads();
        let keys = |a: &Array| heads_first(a, [heads, self.k_dim], self.v_heads / heads);
        let scale = Array::scalar(self.memory().scale)?;
        let inputs = Inputs {
            q: keys(of.q)?.multiply(&scale)?,
            k: keys(of.k)?,
            v: heads_first(of.v, [self.v_heads, self.v_dim], 1)?,
            // [R, L, H] -> [R, H, L]
            f: of.f.swap_axes(1, 2)?,
            b: b.swap_axes(1, 2)?,
        };
        let (y, after) = scan(&inputs, memory, CHUNK)?;
        // [R, H, L, DV] -> [R, L, H, DV]
        Ok((y.transpose_axes(&[0, 2, 1, 3])?, after))
    }
}

/// How the checkpoint stores the input projections.
#[derive(Debug)]
pub enum Projections {
    /// One matrix per kind, interleaved by key head (Qwen3-Next).
    Grouped(Box<Grouped>),
    /// Separate matrices (Qwen3.5).
    Apart(Box<Apart>),
    /// Write strengths and forget gates in one matrix, interleaved by key head; other projections
    /// in separate matrices (Qwen3-Next in GGUF).
    Halved(Box<Halved>),
}

/// Projections interleaved by key head.
#[derive(Debug)]
pub struct Grouped {
    /// Per key head: its query, its key, and the values and output gates of its value heads.
    pub qkvz: Linear,
    /// Per key head: the write strengths and forget gates of its value heads.
    pub ba: Linear,
}

/// Projections in separate matrices.
#[derive(Debug)]
pub struct Apart {
    /// Queries, keys and values.
    pub qkv: Linear,
    /// Output gates.
    pub z: Linear,
    /// Write strengths.
    pub b: Linear,
    /// Forget gates.
    pub a: Linear,
}

/// Projections in which only write strengths and forget gates are interleaved by key head.
#[derive(Debug)]
pub struct Halved {
    /// Queries, keys and values.
    pub qkv: Linear,
    /// Output gates.
    pub z: Linear,
    /// Per key head: the write strengths and forget gates of its value heads.
    pub ba: Linear,
}

/// The outputs of the input projections for `x`, `[1, T, hidden]`, `[1, T, ..]` each.
struct Projected {
    /// The inputs of the convolution.
    qkv: Array,
    /// Output gates, `[1, T, v_heads * v_dim]`.
    z: Array,
    /// Write strengths before the sigmoid, `[1, T, v_heads]`.
    b: Array,
    /// Forget gates before their activation function, `[1, T, v_heads]`.
    a: Array,
}

impl GatedDelta {
    fn projected(&self, x: &Array) -> Result<Projected> {
        let shape = &self.shape;
        let length = x.dim(1)?;
        let per_head = shape.v_heads / shape.k_heads;
        // [1, T, Hk * n] -> [1, T, Hk, n]
        let grouped = |a: &Array| a.reshape(&[1, length, shape.k_heads, -1]);
        let flat = |a: &Array, from: i32, width: i32| {
            a.slice_axis(-1, from, from + width)?
                .reshape(&[1, length, -1])
        };
        let (qkvz, ba) = match &self.projections {
            Projections::Halved(projections) => {
                let ba = grouped(&projections.ba.forward(x)?)?;
                return Ok(Projected {
                    qkv: projections.qkv.forward(x)?,
                    z: projections.z.forward(x)?,
                    b: flat(&ba, 0, per_head)?,
                    a: flat(&ba, per_head, per_head)?,
                });
            }
            Projections::Apart(projections) => {
                return Ok(Projected {
                    qkv: projections.qkv.forward(x)?,
                    z: projections.z.forward(x)?,
                    b: projections.b.forward(x)?,
                    a: projections.a.forward(x)?,
                });
            }
            Projections::Grouped(projections) => {
                (projections.qkvz.forward(x)?, projections.ba.forward(x)?)
            }
        };
        let (qkvz, ba) = (grouped(&qkvz)?, grouped(&ba)?);
        let (k_dim, values) = (shape.k_dim, per_head * shape.v_dim);
        let parts = [
            flat(&qkvz, 0, k_dim)?,
            flat(&qkvz, k_dim, k_dim)?,
            flat(&qkvz, 2 * k_dim, values)?,
        ];
        Ok(Projected {
            qkv: concatenate(&parts.iter().collect::<Vec<_>>(), -1)?,
            z: flat(&qkvz, 2 * k_dim + values, values)?,
            b: flat(&ba, 0, per_head)?,
            a: flat(&ba, per_head, per_head)?,
        })
    }
}

/// Normalizes `x` to length one along the last axis.
pub(super) fn unit(x: &Array) -> Result<Array> {
    let squares = x.multiply(x)?.sum(-1, true)?;
    x.multiply(&squares.add(&Array::scalar(EPS)?)?.rsqrt()?)
}

impl Mixer for GatedDelta {
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
        let Projected { qkv, z, b, a } = self.projected(&through(norm, x)?)?;
        // The state is float32, so the gates are float32, too.
        let wide = |a: &Array| a.astype(Dtype::Float32);
        let differentiated = adapter::differentiated();
        let strength = sigmoid(&wide(&b)?, differentiated)?;
        let decay = wide(&a)?.add(&self.dt_bias)?;
        let decay = softplus(&decay, differentiated)?.multiply(&self.rates)?;
        let qkv = wide(&qkv)?;
        let per_key = (shape.v_heads / shape.k_heads).unsigned_abs() as usize;
        let outputs = over_rows(rows, layer, &self.layout, |span, state| {
            let (mixed, before) = self.conv.forward(&span.of(&qkv)?, part(&state, 0)?)?;
            let mixed = silu(&mixed, None, adapter::differentiated())?;
            let keys = |from: i32| {
                let heads = [span.rows, span.length, shape.k_heads, shape.k_dim];
                let all = mixed.slice_axis(2, from, from + shape.keys())?;
                let all = unit(&all.reshape(&heads)?)?;
                let copies = match shape.tiled {
                    true => concatenate(&vec![&all; per_key], 2)?,
                    false => all,
                };
                copies.reshape(&[span.rows, span.length, -1])
            };
            let (q, k) = (keys(0)?, keys(shape.keys())?);
            let v = mixed.slice_axis(2, 2 * shape.keys(), shape.channels())?;
            let (f, b) = (span.of(&decay)?, span.of(&strength)?);
            let inputs = MemoryInputs {
                q: &q,
                k: &k,
                v: &v,
                f: &f,
                second: Some(&b),
            };
            let recurrent = [part(&state, 1)?.clone()];
            let differentiated = adapter::differentiated();
            let (y, after) = match recurrence::by_kernel(differentiated, || {
                shape.memory().scan(&inputs, &recurrent)
            })? {
                Some((y, after)) => (y, part(&after, 0)?.clone()),
                None => shape.scan(&inputs, &b, &recurrent[0])?,
            };
            let heads = [span.rows, span.length, shape.v_heads, shape.v_dim];
            Ok((y.reshape(&heads)?, vec![before, after]))
        })?;
        let outputs = positions.of(&outputs, &lengths)?;
        let gate = wide(&positions.of(&z, &lengths)?)?.reshape(outputs.shape())?;
        let normed = self.norm.forward(&outputs)?;
        let outputs = silu(&gate, Some(&normed), adapter::differentiated())?;
        let left = outputs.dim(1)?;
        let outputs = outputs
            .reshape(&[1, left, shape.values()])?
            .astype(x.dtype())?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.out_proj
            .forward_from(None, &outputs, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
