//! The sLSTM layer of xLSTM (Beck et al. 2024, arXiv:2405.04517, section 2.2; reference:
//! `sLSTMLayer` of the package `xlstm`, with its function `slstm`): a scalar memory per element.
//! Its gates depend on the previous output, so positions are computed one after another.
//!
//! ```text
//! raw = W x + R y + b               of the gates i, f, z, o; i and f see x after a convolution
//! m'  = max(i, m + logsigmoid(f))   i alone before the first position
//! c'  = exp(m + logsigmoid(f) - m') c + exp(i - m') tanh(z)
//! n'  = exp(m + logsigmoid(f) - m') n + exp(i - m')
//! y'  = sigmoid(o) c' / n'
//! ```

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, stack, where_};

use super::adapter::{self, SlotView};
use super::attention::Positions;
use super::causal_conv::CausalConv;
use super::head_matrices::HeadMatrices;
use super::head_norm::HeadNorm;
use super::hooks::Watch;
use super::mixer::Mixer;
use super::mlstm_cell::log_sigmoid;
use super::norm::{Norm, through};
use super::recurrence::over_rows;
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::recurrence::{self, ScalarMemory};

/// One sLSTM layer.
#[derive(Debug)]
pub struct Slstm {
    /// The convolution over the last positions, whose output is the input of the gates `i` and `f`.
    pub conv: Option<CausalConv>,
    /// The matrices of the gates i, f, z and o.
    pub gates: [HeadwiseLinear; 4],
    /// The matrices from the previous output to the gates, `[heads, dim, 4 * dim]`.
    pub recurrent: Array,
    /// The biases of the gates, `[4, heads, dim]`.
    pub bias: Array,
    /// The norm of each head's output.
    pub norm: HeadNorm,
    /// Number of heads.
    pub heads: i32,
    /// Elements per head.
    pub dim: i32,
    /// The layout of the state, from [`Slstm::state_layout`].
    pub layout: Arc<StateLayout>,
}

/// One matrix per head, applied only to that head's elements.
#[derive(Debug)]
pub struct HeadwiseLinear {
    /// `[heads, in, out]`.
    pub matrices: HeadMatrices,
    /// The slot for adapters.
    pub slot: SlotView,
}

impl HeadwiseLinear {
    /// Maps `x` `[heads, T, in]` to `[heads, T, out]`.
    fn forward(&self, x: &Array) -> Result<Array> {
        let stored = || -> Result<Array> {
            let positions = x.swap_axes(0, 1)?.expand_dims(0)?; // [1, T, heads, in]
            let y = self.matrices.forward(&positions)?;
            y.squeeze_axis(0)?.swap_axes(0, 1)
        };
        if !self.slot.is_adapted() {
            return stored();
        }
        if let Some(trained) = self.slot.vector(x.dtype())? {
            return x.matmul(&trained.astype(x.dtype())?.swap_axes(-1, -2)?);
        }
        match self.slot.forward(x, false, stored)? {
            Some(y) => Ok(y),
            None => stored(),
        }
    }
}

impl Slstm {
    /// Returns the layout of a row's state in this layer, in float32: output, memory, normalizer
    /// and stabilizer of each element, and the last inputs of the convolution over `width`
    /// positions (`width` is 1 without a convolution).
    pub fn state_layout(hidden: i32, width: i32) -> Arc<StateLayout> {
        let part = |name| StatePart::new(name, &[hidden]);
        let mut parts = vec![part("y"), part("c"), part("n"), part("m")];
        if width > 1 {
            parts.push(StatePart::new("conv", &[width - 1, hidden]));
        }
        StateLayout::new("slstm", parts)
    }

    /// Applies a gate's matrices: `[R, L, hidden] -> [heads, R * L, dim] -> [R, L, heads, dim]`.
    fn gate(&self, at: usize, x: &Array, (rows, length): (i32, i32)) -> Result<Array> {
        let heads = x
            .reshape(&[rows * length, self.heads, self.dim])?
            .swap_axes(0, 1)?;
        self.gates[at]
            .forward(&heads)?
            .swap_axes(0, 1)?
            .reshape(&[rows, length, self.heads, self.dim])
    }

    /// Computes all positions of `gates` `[R, L, 4, heads, dim]`. Returns the outputs `[R, L,
    /// heads, dim]` and the state after the last position.
    fn positions(
        &self,
        gates: &Array,
        recurrent: &Array,
        mut state: [Array; 4],
    ) -> Result<(Array, [Array; 4])> {
        let positions = ScalarMemory { gates, recurrent };
        let on_kernels =
            recurrence::by_kernel(adapter::differentiated(), || positions.scan(&state))?;
        if let Some(outputs) = on_kernels {
            return Ok(outputs);
        }
        let mut outputs = Vec::new();
        for at in 0..gates.dim(1)? {
            let gates_at = gates.slice_axis(1, at, at + 1)?.squeeze_axis(1)?;
            state = self.step(&gates_at, recurrent, state)?;
            outputs.push(state[0].clone());
        }
        Ok((stack(&outputs.iter().collect::<Vec<_>>(), 1)?, state))
    }

    /// Computes one position. `gates` `[R, 4, heads, dim]` is the term that depends on the input.
    /// `y`, `c`, `n` and `m` have the shape `[R, heads, dim]`.
    fn step(&self, gates: &Array, recurrent: &Array, state: [Array; 4]) -> Result<[Array; 4]> {
        let [y, c, n, m] = state;
        let rows = gates.dim(0)?;
        // [R, H, 1, D] x [H, D, 4 D] -> [R, H, 4, D] -> [R, 4, H, D]
        let back = y
            .expand_dims(2)?
            .matmul(recurrent)?
            .reshape(&[rows, self.heads, 4, self.dim])?
            .swap_axes(1, 2)?;
        let raw = gates.add(&back)?;
        let gate = |at: i32| raw.slice_axis(1, at, at + 1)?.squeeze_axis(1);
        let (i, f, z, o) = (gate(0)?, gate(1)?, gate(2)?, gate(3)?);
        let decayed = m.add(&log_sigmoid(&f)?)?;
        let empty = n.equal(&Array::scalar(0.0f32)?)?;
        let m = where_(&empty, &i, &i.maximum(&decayed)?)?;
        let one = Array::scalar(1.0f32)?;
        let take = i.subtract(&m)?.exp()?.minimum(&one)?;
        let keep = decayed.subtract(&m)?.exp()?.minimum(&one)?;
        let c = c.multiply(&keep)?.add(&z.tanh()?.multiply(&take)?)?;
        let n = n.multiply(&keep)?.add(&take)?;
        let y = o.sigmoid()?.multiply(&c)?.divide(&n)?;
        Ok([y, c, n, m])
    }
}

impl Mixer for Slstm {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        // The state is float32, so the layer computes in float32.
        let input = through(norm, x)?.astype(Dtype::Float32)?;
        let wide = |a: &Array| a.astype(Dtype::Float32);
        let (recurrent, bias) = (wide(&self.recurrent)?, wide(&self.bias)?);
        let hidden = over_rows(rows, layer, &self.layout, |span, mut state| {
            let size = (span.rows, span.length);
            let x = span.of(&input)?; // [R, L, hidden]
            let (seen, before) = match &self.conv {
                Some(conv) => {
                    let before = state.split_off(4);
                    let none = || x.slice_axis(1, 0, 0);
                    let before = before.first().cloned().map_or_else(none, Ok)?;
                    let (seen, before) = conv.forward(&x, &before)?;
                    (seen.silu()?, (conv.width() > 1).then_some(before))
                }
                None => (x.clone(), None),
            };
            let gates = [
                self.gate(0, &seen, size)?,
                self.gate(1, &seen, size)?,
                self.gate(2, &x, size)?,
                self.gate(3, &x, size)?,
            ];
            // [R, L, 4, H, D]
            let gates = stack(&gates.iter().collect::<Vec<_>>(), 2)?.add(&bias)?;
            let wide = [span.rows, self.heads, self.dim];
            let mut cell = Vec::with_capacity(4);
            for part in &state {
                cell.push(part.reshape(&wide)?);
            }
            let cell = <[Array; 4]>::try_from(cell).map_err(|_| wrong_state())?;
            let (outputs, cell) = self.positions(&gates, &recurrent, cell)?;
            let flat = [span.rows, self.heads * self.dim];
            let mut after = Vec::with_capacity(5);
            for part in &cell {
                after.push(part.reshape(&flat)?);
            }
            after.extend(before);
            Ok((outputs, after))
        })?;
        let hidden = positions.of(&hidden, &lengths)?;
        let y = self.norm.forward(&hidden, x.dtype())?;
        match add {
            true => positions.of(x, &lengths)?.add(&y),
            false => Ok(y),
        }
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}

fn wrong_state() -> mlx_rs_core::Error {
    mlx_rs_core::Error::new(
        mlx_rs_core::ErrorKind::Value,
        "slstm",
        "a state has four parts of each element",
    )
}
