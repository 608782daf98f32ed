//! The short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404): a depthwise convolution over
//! the last positions, with a gate before and after it. Its state is the convolution's last inputs.
//!
//! ```text
//! b, c, x = W_in h
//! y       = W_out (c * conv(b * x))
//! ```

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result};

use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::Norm;
use super::recurrence::{over_rows, part};
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};

/// A short convolution layer.
#[derive(Debug)]
pub struct ShortConv {
    /// `[hidden] -> [3 * hidden]`: the gate before, the gate after, and the input.
    pub in_proj: Linear,
    /// The convolution over `hidden` channels.
    pub conv: CausalConv,
    /// `[hidden] -> [hidden]`.
    pub out_proj: Linear,
    /// The layout of the state, from [`ShortConv::state_layout`].
    pub layout: Arc<StateLayout>,
}

impl ShortConv {
    /// Returns the layout of a row's state in float32: the last inputs of the convolution over
    /// `width` positions.
    pub fn state_layout(hidden: i32, width: i32) -> Arc<StateLayout> {
        StateLayout::new(
            "short_conv",
            vec![StatePart::new("conv", &[width - 1, hidden])],
        )
    }
}

impl Mixer for ShortConv {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let wide = self.in_proj.forward_from(norm, x, None)?; // [1, T, 3 * hidden]
        let width = wide.dim(-1)? / 3;
        let third = |at: i32| wide.slice_axis(-1, at * width, (at + 1) * width);
        let gated = third(0)?.multiply(&third(2)?)?.astype(Dtype::Float32)?;
        let mixed = over_rows(rows, layer, &self.layout, |span, state| {
            let (y, before) = self.conv.forward(&span.of(&gated)?, part(&state, 0)?)?;
            Ok((y, vec![before]))
        })?;
        let mixed = positions.of(&mixed, &lengths)?.astype(x.dtype())?;
        let gate = positions.of(&third(1)?, &lengths)?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.out_proj
            .forward_from(None, &gate.multiply(&mixed)?, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
