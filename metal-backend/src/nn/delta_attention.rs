//! Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): a gated delta net whose forget gate has
//! one value per channel. `diagonal_rule.rs` computes the recurrence.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result};

use super::adapter;
use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::diagonal_rule::{Inputs, scan};
use super::gated_delta::unit;
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use super::recurrence::{over_rows, part};
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::activation::{sigmoid, silu, softplus};

/// A Kimi Delta Attention layer.
#[derive(Debug)]
pub struct DeltaAttention {
    /// Queries, keys and values, `[hidden] -> [heads * dim]` each, with their convolutions.
    pub inputs: [(Linear, CausalConv); 3],
    /// The low-rank projection of forget gates, `[hidden] -> [dim] -> [heads * dim]`.
    pub forget: [Linear; 2],
    /// Write strengths before the sigmoid, `[hidden] -> [heads]`.
    pub strength: Linear,
    /// The low-rank projection of output gates, `[hidden] -> [dim] -> [heads * dim]`.
    pub gate: [Linear; 2],
    /// Negative decay rates, `[heads, 1]` in float32.
    pub rates: Array,
    /// Bias on the forget gates before their softplus, `[heads * dim]` in float32.
    pub dt_bias: Array,
    /// The norm of each head's output.
    pub norm: Norm,
    /// `[heads * dim] -> [hidden]`.
    pub o_proj: Linear,
    /// The layer's sizes.
    pub shape: DeltaAttentionShape,
    /// The layout of the state, from [`DeltaAttentionShape::layout`].
    pub layout: Arc<StateLayout>,
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaAttentionShape {
    /// Heads.
    pub heads: i32,
    /// Elements per head.
    pub dim: i32,
    /// The kernel width of the convolutions.
    pub width: i32,
}

impl DeltaAttentionShape {
    /// Returns the elements of all heads.
    pub fn inner(&self) -> i32 {
        self.heads * self.dim
    }

    /// Returns the layout of a row's state, in float32: the last inputs of the convolutions, and
    /// one matrix per head.
    pub fn layout(&self) -> Arc<StateLayout> {
        let last = [self.width - 1, self.inner()];
        StateLayout::new(
            "delta_attention",
            vec![
                StatePart::new("q", &last),
                StatePart::new("k", &last),
                StatePart::new("v", &last),
                StatePart::new("S", &[self.heads, self.dim, self.dim]),
            ],
        )
    }
}

/// Computes `second(first(x))`.
fn low_rank([first, second]: &[Linear; 2], x: &Array) -> Result<Array> {
    second.forward(&first.forward(x)?)
}

impl Mixer for DeltaAttention {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let DeltaAttentionShape { heads, dim, .. } = self.shape;
        let hidden = through(norm, x)?;
        let total = hidden.dim(1)?;
        // The state is float32, so the gates are float32, too.
        let wide = |a: &Array| a.astype(Dtype::Float32);
        let differentiated = adapter::differentiated();
        let strength = wide(&self.strength.forward(&hidden)?)?;
        let strength = sigmoid(&strength, differentiated)?; // [1, T, H]
        let forget = wide(&low_rank(&self.forget, &hidden)?)?.add(&self.dt_bias)?;
        let decay = softplus(&forget, differentiated)?
            .reshape(&[1, total, heads, dim])?
            .multiply(&self.rates)?
            .reshape(&[1, total, heads * dim])?;
        let mut projected = Vec::with_capacity(3);
        for (linear, _) in &self.inputs {
            projected.push(wide(&linear.forward(&hidden)?)?);
        }
        let outputs = over_rows(rows, layer, &self.layout, |span, state| {
            let apart = [span.rows, span.length, heads, dim];
            let mut mixed = Vec::with_capacity(3);
            let mut after = Vec::with_capacity(4);
            for (at, (_, conv)) in self.inputs.iter().enumerate() {
                let (y, last) = conv.forward(&span.of(&projected[at])?, part(&state, at)?)?;
                let y = silu(&y, None, differentiated)?;
                mixed.push(y.reshape(&apart)?);
                after.push(last);
            }
            let strength = span.of(&strength)?.expand_dims(-1)?; // [R, L, H, 1]
            let scale = Array::scalar((dim as f32).powf(-0.5))?;
            let k = unit(part(&mixed, 1)?)?;
            let f = span.of(&decay)?.reshape(&apart)?;
            // The delta rule reads the memory after its decay, so `a` includes the decay.
            let a = k.multiply(&f.exp()?)?.multiply(&strength)?.negative()?;
            let inputs = Inputs {
                q: unit(part(&mixed, 0)?)?.multiply(&scale)?,
                k,
                v: part(&mixed, 2)?.multiply(&strength)?,
                f,
                a,
                b: None,
            };
            let (y, memory) = scan(&inputs, part(&state, 3)?)?;
            after.push(memory);
            Ok((y, after))
        })?;
        let outputs = positions.of(&outputs, &lengths)?;
        let gate = low_rank(&self.gate, &positions.of(&hidden, &lengths)?)?;
        let gate = sigmoid(&wide(&gate)?, differentiated)?.reshape(outputs.shape())?;
        let outputs = self.norm.forward(&outputs)?.multiply(&gate)?;
        let left = outputs.dim(1)?;
        let outputs = outputs
            .reshape(&[1, left, heads * dim])?
            .astype(x.dtype())?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.o_proj.forward_from(None, &outputs, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
