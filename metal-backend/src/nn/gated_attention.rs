//! Attention with a gate on each head's output (Qiu et al. 2025, arXiv:2505.06708; as in
//! Qwen3-Next). The query projection or a separate projection computes the gates.

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use super::adapter;
use super::attention::{Attention, Positions};
use super::attention_parts::furthest;
use super::hooks::Watch;
use super::linear::{Linear, project};
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, LayerState, Row, Switch, lengths};
use crate::exec::Epilogue;
use crate::exec::activation::{sigmoid, softplus};

/// A gated attention layer.
#[derive(Debug)]
pub struct GatedAttention {
    /// The attention layer. If `gate` is `None`, `q_proj` is `[hidden] -> [n_heads * 2 *
    /// head_dim]`: per head the query, then the gate.
    pub attention: Attention,
    /// The separate projection of the gates, if there is one.
    pub gate: Option<OutputGate>,
}

/// A projection of gates.
#[derive(Debug)]
pub struct OutputGate {
    /// `[hidden] -> [n_heads * head_dim]` (AFMoE), or `[hidden] -> [n_heads]` with one gate for
    /// each head (Step 3.5, Laguna).
    pub linear: Linear,
    /// The function of the gates.
    pub function: GateFunction,
}

/// The function of an output gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateFunction {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `log(1 + exp(x))` (Laguna).
    Softplus,
}

impl GatedAttention {
    /// Splits the output of `q_proj` into queries and gates, `[1, T, n_heads * head_dim]` each.
    fn split(&self, both: &Array) -> Result<(Array, Array)> {
        let (heads, dim) = (self.attention.n_heads, self.attention.head_dim);
        let length = both.dim(1)?;
        let grouped = both.reshape(&[1, length, heads, 2 * dim])?;
        let half = |from: i32| {
            grouped
                .slice_axis(-1, from, from + dim)?
                .reshape(&[1, length, heads * dim])
        };
        Ok((half(0)?, half(dim)?))
    }

    /// Multiplies the heads' outputs `[1, T, n_heads * head_dim]` by `function(gate)`.
    fn opened(&self, attended: &Array, gate: &Array) -> Result<Array> {
        let function = self.gate.as_ref().map(|gate| gate.function);
        let differentiated = adapter::differentiated();
        let gate = match function {
            Some(GateFunction::Softplus) => {
                let wide = gate.astype(Dtype::Float32)?;
                softplus(&wide, differentiated)?.astype(gate.dtype())?
            }
            Some(GateFunction::Sigmoid) | None => sigmoid(gate, differentiated)?,
        };
        let (heads, dim) = (self.attention.n_heads, self.attention.head_dim);
        if gate.dim(-1)? == heads * dim {
            return attended.multiply(&gate);
        }
        let shape = attended.shape().to_vec();
        let grouped = attended.reshape(&[1, attended.dim(1)?, heads, dim])?;
        grouped.multiply(&gate.expand_dims(-1)?)?.reshape(&shape)
    }
}

impl Mixer for GatedAttention {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let attention = &self.attention;
        let lengths = lengths(rows);
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        let heads = attention.heads_for_kernels(furthest(rows))?;
        let heads = heads.filter(|_| !watch.wants_attention());
        let packed = match (&heads, &attention.k_proj, &attention.v_proj) {
            (Some(_), Some(k_proj), Some(v_proj)) => {
                let layers = [&attention.q_proj, k_proj, v_proj];
                project(&layers, norm, Epilogue::None, x)?
            }
            _ => None,
        };
        let separate = match &self.gate {
            Some(gate) => {
                let x = positions.of(x, &lengths)?;
                Some(gate.linear.forward(&through(norm, &x)?)?)
            }
            None => None,
        };
        let (attended, gate) = match (heads, packed) {
            (Some((heads, precomputed)), Some(packed)) => {
                let (packed, gate) = match separate {
                    Some(gate) => (packed, gate),
                    None => {
                        let wide = 2 * attention.n_heads * attention.head_dim;
                        let (queries, gate) = self.split(&packed.slice_axis(2, 0, wide)?)?;
                        let others = packed.slice_axis(2, wide, packed.dim(2)?)?;
                        let packed = concatenate(&[&queries, &others], 2)?;
                        (packed, positions.of(&gate, &lengths)?)
                    }
                };
                let heads = (&heads, precomputed);
                (
                    attention.attend_packed(heads, &packed, rows, layer, positions)?,
                    gate,
                )
            }
            _ => {
                let x = through(norm, x)?;
                let both = attention.q_proj.forward(&positions.of(&x, &lengths)?)?;
                let (queries, gate) = match separate {
                    Some(gate) => (both, gate),
                    None => self.split(&both)?,
                };
                let views = attention.update_kv(&x, rows, layer)?;
                let shown = (layer, watch);
                let attended =
                    attention.attend_projected(&queries, &views, &lengths, positions, shown)?;
                (attended, gate)
            }
        };
        let attended = self.opened(&attended, &gate)?;
        (attention.o_proj).forward_from(None, &attended, residual.as_ref())
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        options.cache(self.attention.window)
    }

    fn switch(&self) -> Option<Switch> {
        self.attention.switch()
    }
}
