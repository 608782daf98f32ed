//! Scores of attention, their softmax, and sums over values, computed by MLX's operations.

use inference::AttentionSums;
use mlx_rs_core::{Array, Dtype, Result, concatenate, fast, where_};

use super::attention::Attention;
use super::attention_mask::{AttentionMask, attention_mask, nearer, visible};
use crate::cache::{KvView, Stored, map};

impl Attention {
    /// Returns the attention weights of the last of `queries`, at `position`: `[H, n]`.
    pub(super) fn last_weights(
        &self,
        queries: &Array,
        view: &KvView,
        position: i32,
    ) -> Result<Array> {
        let length = queries.dim(2)?;
        let last = queries.slice_axis(2, length - 1, length)?;
        let total = view.keys.positions()?;
        let window = nearer(self.window, view.window);
        let mask = visible(view.order, position, 1, total, (window, self.chunk))?;
        self.weights(&last, &view.keys, Some(&mask))?
            .astype(queries.dtype())?
            .reshape(&[self.n_heads, total])
    }

    /// Returns the attention output of `queries` `[1, H, length, D]` at positions from `offset` on.
    pub(super) fn attend_row(
        &self,
        queries: &Array,
        view: &KvView,
        offset: i32,
        length: i32,
    ) -> Result<Array> {
        let (keys, values, mask) = attention_mask((self.window, self.chunk), view, offset, length)?;
        let wide = self.sums != AttentionSums::Native;
        let in_steps = wide || self.softcap.is_some() || self.sinks.is_some();
        match (&keys, &values) {
            (Stored::Plain(keys), Stored::Plain(values)) if !in_steps => {
                let mask = match &mask {
                    AttentionMask::None => fast::Mask::None,
                    AttentionMask::Causal => fast::Mask::Causal,
                    AttentionMask::Array(mask) => fast::Mask::Array(mask),
                };
                fast::scaled_dot_product_attention(queries, keys, values, self.scale, mask)
            }
            _ => {
                let mask = match mask {
                    AttentionMask::None => None,
                    AttentionMask::Causal => Some(visible(
                        view.order,
                        offset,
                        length,
                        keys.positions()?,
                        (None, None),
                    )?),
                    AttentionMask::Array(mask) => Some(mask),
                };
                self.attend_in_steps(queries, &keys, &values, mask.as_ref())
            }
        }
    }

    /// Returns the attention output of `queries` `[1, H, L, D]` over keys and values `[1, Hkv, n,
    /// D]`, with a boolean mask that broadcasts to `[1, H, L, n]`.
    pub(super) fn attend_masked(
        &self,
        queries: &Array,
        keys: &Array,
        values: &Array,
        mask: Option<&Array>,
    ) -> Result<Array> {
        if self.sums == AttentionSums::Native && self.softcap.is_none() && self.sinks.is_none() {
            let mask = mask.map_or(fast::Mask::None, fast::Mask::Array);
            return fast::scaled_dot_product_attention(queries, keys, values, self.scale, mask);
        }
        // The scores have an additional axis for groups of query heads.
        let mask = mask.map(|mask| mask.expand_dims(1)).transpose()?;
        let [keys, values] = [keys, values].map(|a| Stored::Plain(a.clone()));
        self.attend_in_steps(queries, &keys, &values, mask.as_ref())
    }

    /// Returns the type in which the layer computes for inputs of type `dtype`.
    fn sum_type(&self, dtype: Dtype) -> Dtype {
        match self.sums {
            AttentionSums::Float64 => Dtype::Float64,
            _ => dtype,
        }
    }

    /// Returns the attention weights `[B, Hkv, H / Hkv, L, n]` of `queries` `[B, H, L, D]`,
    /// computed in the type that [`Self::sum_type`] returns. `mask` is boolean, or is added to the
    /// scores.
    fn weights(&self, queries: &Array, keys: &Stored, mask: Option<&Array>) -> Result<Array> {
        let queries = &queries.astype(self.sum_type(queries.dtype()))?;
        let (batch, length) = (queries.dim(0)?, queries.dim(2)?);
        let (groups, repeats) = (self.n_kv_heads, self.n_heads / self.n_kv_heads);
        let scalar = |v: f32| Array::scalar(v)?.astype(queries.dtype());
        // [B, Hkv, repeats, L, D] x [B, Hkv, 1, D, total]
        let queries = queries.multiply(&scalar(self.scale)?)?.reshape(&[
            batch,
            groups,
            repeats,
            length,
            self.head_dim,
        ])?;
        let mut scores = match keys {
            Stored::Plain(keys) => {
                let keys = keys.astype(self.sum_type(keys.dtype()))?;
                queries.matmul(&keys.expand_dims(2)?.swap_axes(-1, -2)?)?
            }
            Stored::Quantized(keys) => {
                map(keys, |a| a.expand_dims(2))?.matmul_transposed(&queries)?
            }
        };
        if let Some(cap) = self.softcap {
            let cap = scalar(cap)?;
            scores = scores.divide(&cap)?.tanh()?.multiply(&cap)?;
        }
        if let Some(bias) = mask.filter(|mask| mask.dtype() != Dtype::Bool) {
            scores = scores.add(&bias.astype(scores.dtype())?)?;
        } else if let Some(mask) = mask {
            let least = match scores.dtype() {
                Dtype::Float16 => f32::from(half::f16::MIN),
                Dtype::Bfloat16 => f32::from(half::bf16::MIN),
                _ => f32::MIN,
            };
            scores = where_(mask, &scores, &scalar(least)?)?;
        }
        match &self.sinks {
            None => shares(&scores),
            Some(sinks) => {
                let sinks = sinks
                    .astype(scores.dtype())?
                    .reshape(&[1, groups, repeats, 1, 1])?
                    .broadcast_to(&[batch, groups, repeats, length, 1])?;
                let total = scores.dim(-1)?;
                shares(&concatenate(&[&scores, &sinks], -1)?)?.slice_axis(-1, 0, total)
            }
        }
    }

    /// Computes attention with single operations, for features that MLX's fused kernel does not
    /// support: a cap on scores, sinks, packed keys, or double precision.
    pub(super) fn attend_in_steps(
        &self,
        queries: &Array,
        keys: &Stored,
        values: &Stored,
        mask: Option<&Array>,
    ) -> Result<Array> {
        let (batch, length) = (queries.dim(0)?, queries.dim(2)?);
        let shares = self.weights(queries, keys, mask)?;
        let attended = match values {
            Stored::Plain(values) => {
                let values = values.astype(self.sum_type(values.dtype()))?;
                shares.matmul(&values.expand_dims(2)?)?
            }
            Stored::Quantized(values) => map(values, |a| a.expand_dims(2))?.matmul(&shares)?,
        };
        attended
            .astype(queries.dtype())?
            .reshape(&[batch, self.n_heads, length, self.head_dim])
    }
}

/// Returns the softmax of scores along the last axis, in their type. For float64, MLX computes
/// exponentials only with float32 precision, so this function uses `expm1`, which has float64
/// precision.
fn shares(scores: &Array) -> Result<Array> {
    if scores.dtype() != Dtype::Float64 {
        return scores.softmax(-1, true);
    }
    let below = scores.subtract(&scores.max(-1, true)?)?;
    let weights = below
        .expm1()?
        .add(&Array::scalar(1.0f32)?.astype(Dtype::Float64)?)?;
    weights.divide(&weights.sum(-1, true)?)
}
