//! The mLSTM layer of xLSTM (Beck et al. 2024, arXiv:2405.04517; as in xLSTM 7B, arXiv:2503.13427):
//! projections, soft-capped gates, the recurrence, a norm of each head, and an output gate. A
//! kernel or `mlstm_cell.rs` computes the recurrence.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result};

use super::adapter;
use super::attention::Positions;
use super::head_norm::HeadNorm;
use super::hooks::Watch;
use super::linear::{Linear, project};
use super::mixer::Mixer;
use super::mlstm_cell::{Inputs, Memory, log_sigmoid, scan, scan_on_gpu};
use super::norm::{Norm, through};
use super::recurrence::over_rows;
use crate::cache::{
    CacheOptions, LayerState, RecurrentState, Row, StateLayout, StatePart, lengths,
};
use crate::exec::Epilogue;
use crate::exec::activation::sigmoid;
use crate::exec::recurrence::{self, MemoryInputs, MemoryRule};

/// One mLSTM layer.
#[derive(Debug)]
pub struct Mlstm {
    /// `[hidden] -> [heads * qk_dim]`.
    pub q_proj: Linear,
    /// `[hidden] -> [heads * qk_dim]`.
    pub k_proj: Linear,
    /// `[hidden] -> [heads * v_dim]`.
    pub v_proj: Linear,
    /// `[hidden] -> [heads * v_dim]`, before the sigmoid.
    pub output_gate: Linear,
    /// `[hidden] -> [heads]`, with a bias.
    pub input_gate: Linear,
    /// `[hidden] -> [heads]`, with a bias.
    pub forget_gate: Linear,
    /// The norm of each head's output.
    pub norm: HeadNorm,
    /// `[heads * v_dim] -> [hidden]`.
    pub o_proj: Linear,
    /// The sizes, and the constants of the recurrence.
    pub shape: MlstmShape,
    /// The layout of the state, from [`MlstmShape::layout`].
    pub layout: Arc<StateLayout>,
}

/// The sizes of an mLSTM layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlstmShape {
    /// Number of heads.
    pub heads: i32,
    /// Elements per head of queries and of keys.
    pub qk_dim: i32,
    /// Elements per head of values.
    pub v_dim: i32,
    /// Cap on input and forget gates: `cap * tanh(gate / cap)` keeps them within `-cap..cap`.
    pub gate_cap: Option<f32>,
    /// Epsilon, added to the denominator.
    pub eps: f32,
    /// The number of positions per chunk. It does not change the result.
    pub chunk: i32,
}

impl MlstmShape {
    /// Returns the layout of a row's state in this layer: `C`, `n` and `m`, in float32.
    pub fn layout(&self) -> Arc<StateLayout> {
        let (h, dk, dv) = (self.heads, self.qk_dim, self.v_dim);
        StateLayout::new(
            "mlstm",
            vec![
                StatePart::new("C", &[h, dk, dv]),
                StatePart::new("n", &[h, dk]),
                StatePart::new("m", &[h]),
            ],
        )
    }

    /// Returns the output widths of the projections: queries, keys, values, output gates, input
    /// gates, forget gates.
    fn widths(&self) -> [i32; 6] {
        let (qk, v) = (self.heads * self.qk_dim, self.heads * self.v_dim);
        [qk, qk, v, v, self.heads, self.heads]
    }

    /// The parameters of the recurrence for the kernels.
    fn memory(&self) -> recurrence::Memory {
        recurrence::Memory {
            rule: MemoryRule::Exponential {
                gate_cap: self.gate_cap,
                eps: self.eps,
            },
            heads: self.heads,
            key_heads: self.heads,
            key_dim: self.qk_dim,
            value_dim: self.v_dim,
            scale: (self.qk_dim as f32).powf(-0.5),
            chunk: self.chunk,
        }
    }

    /// Applies the cap to a gate, if there is a cap.
    fn capped(&self, gate: &Array) -> Result<Array> {
        match self.gate_cap {
            None => Ok(gate.clone()),
            Some(cap) => {
                let cap = Array::scalar(cap)?;
                gate.divide(&cap)?.tanh()?.multiply(&cap)
            }
        }
    }

    /// Computes the recurrence over `[R, L, ..]` with MLX's operations. Returns the outputs `[R, L,
    /// H, DV]` and the state after the last position.
    fn scan(&self, of: &MemoryInputs<'_>, i: &Array, state: Vec<Array>) -> Result<Scanned> {
        let [rows, length] = [of.f.dim(0)?, of.f.dim(1)?];
        // [R, L, H*D] -> [R, H, L, D]
        let heads = |a: &Array, dim: i32| {
            a.reshape(&[rows, length, self.heads, dim])?
                .transpose_axes(&[0, 2, 1, 3])
        };
        // [R, L, H] -> [R, H, L]
        let gates = |a: &Array| a.swap_axes(1, 2);
        let scale = Array::scalar(self.memory().scale)?;
        let inputs = Inputs {
            q: heads(of.q, self.qk_dim)?.multiply(&scale)?,
            k: heads(of.k, self.qk_dim)?,
            v: heads(of.v, self.v_dim)?,
            i: gates(&self.capped(i)?)?,
            f: gates(&log_sigmoid(&self.capped(of.f)?)?)?,
        };
        let memory = Memory::try_from(state)?;
        let (h, after) = match recurrence::uses_gpu_kernels(adapter::differentiated())? {
            true => scan_on_gpu(&inputs, &memory, self.chunk, self.eps)?,
            false => scan(&inputs, memory, self.chunk, self.eps)?,
        };
        // [R, H, L, DV] -> [R, L, H, DV]
        let h = h.transpose_axes(&[0, 2, 1, 3])?;
        Ok((h, vec![after.c, after.n, after.m]))
    }
}

/// The outputs of positions, and the state after them.
type Scanned = (Array, Vec<Array>);

impl Mlstm {
    /// Computes queries, keys, values, output gates, input gates and forget gates of `x` `[1, T,
    /// hidden]`, each `[1, T, width]`.
    fn projected(&self, x: &Array, norm: Option<&Norm>) -> Result<[Array; 6]> {
        // The kernels fuse at most four matrices per operation, so there are two operations.
        let wide = [&self.q_proj, &self.k_proj, &self.v_proj, &self.output_gate];
        let narrow = [&self.input_gate, &self.forget_gate];
        if x.dtype() == Dtype::Float32
            && let Some(wide) = project(&wide, norm, Epilogue::None, x)?
            && let Some(narrow) = project(&narrow, norm, Epilogue::None, x)?
        {
            let [q, k, v, out, i, f] = self.shape.widths();
            let part =
                |packed: &Array, from: i32, width: i32| packed.slice_axis(2, from, from + width);
            return Ok([
                part(&wide, 0, q)?,
                part(&wide, q, k)?,
                part(&wide, q + k, v)?,
                part(&wide, q + k + v, out)?,
                part(&narrow, 0, i)?,
                part(&narrow, i, f)?,
            ]);
        }
        let x = through(norm, x)?;
        let wide = x.astype(Dtype::Float32)?;
        Ok([
            self.q_proj.forward(&x)?,
            self.k_proj.forward(&x)?,
            self.v_proj.forward(&x)?,
            self.output_gate.forward(&x)?,
            self.input_gate.forward(&wide)?,
            self.forget_gate.forward(&wide)?,
        ])
    }
}

impl Mixer for Mlstm {
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
        let [q, k, v, out, i, f] = self.projected(x, norm)?;
        // The state is float32, so the recurrence is float32, too. Gates are logarithms, for which
        // 16-bit floats have too little precision.
        let wide = |a: Array| a.astype(Dtype::Float32);
        let (q, k, v, i, f) = (wide(q)?, wide(k)?, wide(v)?, wide(i)?, wide(f)?);
        let outputs = over_rows(rows, layer, &self.layout, |span, state| {
            let (q, k, v) = (span.of(&q)?, span.of(&k)?, span.of(&v)?);
            let (i, f) = (span.of(&i)?, span.of(&f)?);
            let inputs = MemoryInputs {
                q: &q,
                k: &k,
                v: &v,
                f: &f,
                second: Some(&i),
            };
            let differentiated = adapter::differentiated();
            match recurrence::by_kernel(differentiated, || shape.memory().scan(&inputs, &state))? {
                Some((h, after)) => {
                    let heads = [span.rows, span.length, shape.heads, shape.v_dim];
                    Ok((h.reshape(&heads)?, after))
                }
                None => shape.scan(&inputs, &i, state),
            }
        })?;
        let outputs = positions.of(&outputs, &lengths)?;
        let gate = sigmoid(&positions.of(&out, &lengths)?, adapter::differentiated())?;
        let outputs = self.norm.forward(&outputs, x.dtype())?.multiply(&gate)?;
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        self.o_proj.forward_from(None, &outputs, residual.as_ref())
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
