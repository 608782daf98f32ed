//! Attention whose value heads are narrower than its query and key heads (MiMo-V2). Values are
//! padded with zeros to the width of keys, so that the usual caches and kernels can be used.

use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate, zeros};

use super::attention::{Attention, Positions};
use super::attention_parts::furthest;
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, LayerState, Row, Switch, lengths};

/// An attention layer with narrow value heads.
#[derive(Debug)]
pub struct UnevenAttention {
    /// The attention, whose value heads are padded to the width of key heads. Its value projection
    /// is `[hidden] -> [n_kv_heads * values]`, and its output projection is `[n_heads * values] ->
    /// [hidden]`.
    pub attention: Attention,
    /// Elements of a value head, at most `head_dim`.
    pub values: i32,
    /// A factor on values.
    pub scale: Option<Array>,
}

impl UnevenAttention {
    /// Returns padded values of `x` `[1, T, hidden]`: `[1, T, n_kv_heads * head_dim]`.
    fn padded(&self, x: &Array) -> Result<Array> {
        let (heads, dim) = (self.attention.n_kv_heads, self.attention.head_dim);
        let length = x.dim(1)?;
        let values = present(self.attention.v_proj.as_ref())?.forward(x)?;
        let values = match &self.scale {
            Some(scale) => values.multiply(scale)?,
            None => values,
        };
        let values = values.reshape(&[1, length, heads, self.values])?;
        let rest = zeros(&[1, length, heads, dim - self.values], values.dtype())?;
        concatenate(&[&values, &rest], -1)?.reshape(&[1, length, heads * dim])
    }

    /// Returns the heads' outputs `[1, T, n_heads * head_dim]` without the padding.
    fn narrowed(&self, attended: &Array) -> Result<Array> {
        let (heads, dim) = (self.attention.n_heads, self.attention.head_dim);
        let length = attended.dim(1)?;
        attended
            .reshape(&[1, length, heads, dim])?
            .slice_axis(-1, 0, self.values)?
            .reshape(&[1, length, heads * self.values])
    }
}

/// Returns the projection, or an error if it is missing.
fn present(projection: Option<&Linear>) -> Result<&Linear> {
    projection.ok_or_else(|| {
        let message = "a layer with narrow values needs keys and values of its own";
        Error::new(ErrorKind::Value, "attention", message)
    })
}

impl Mixer for UnevenAttention {
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
        let x = through(norm, x)?;
        let keys = present(attention.k_proj.as_ref())?.forward(&x)?;
        let values = self.padded(&x)?;
        let heads = attention.heads_for_kernels(furthest(rows))?;
        let attended = match heads.filter(|_| !watch.wants_attention()) {
            Some((heads, precomputed)) => {
                let queries = attention.q_proj.forward(&x)?;
                let packed = concatenate(&[&queries, &keys, &values], -1)?;
                attention.attend_packed((&heads, precomputed), &packed, rows, layer, positions)?
            }
            None => {
                let queries = attention.q_proj.forward(&positions.of(&x, &lengths)?)?;
                let views = attention.update_projected(&keys, &values, rows, layer)?;
                let shown = (layer, watch);
                attention.attend_projected(&queries, &views, &lengths, positions, shown)?
            }
        };
        let narrow = self.narrowed(&attended)?;
        (attention.o_proj).forward_from(None, &narrow, residual.as_ref())
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        options.cache(self.attention.window)
    }

    fn switch(&self) -> Option<Switch> {
        self.attention.switch()
    }
}
