//! Grouped-query self-attention with a cache (Vaswani et al. 2017, Ainslie et al. 2023). What tells
//! families apart (biases, norms, windows, caps, sinks, rotation or none) are fields, not copies.

use mlx_rs_core::{Array, Dtype, Result, concatenate, fast, where_};

use super::norm::through;
use super::{Linear, Norm, Rope};
use crate::cache::KvCache;

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    /// `[hidden] -> [n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[hidden] -> [n_kv_heads * head_dim]`; `None` when keys come from another layer.
    pub k_proj: Option<Linear>,
    /// `[hidden] -> [n_kv_heads * head_dim]`; `None` when values are the keys' projection.
    pub v_proj: Option<Linear>,
    /// `[n_heads * head_dim] -> [hidden]`.
    pub o_proj: Linear,
    /// Norms before rotation.
    pub norms: HeadNorms,
    /// Rotary positions; `None` for a layer without.
    pub rope: Option<Rope>,
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: i32,
    /// Elements per head.
    pub head_dim: i32,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A query sees only the last so many positions, itself included.
    pub window: Option<i32>,
    /// Scores are squeezed into `-cap..cap` by a tanh (Gemma 2).
    pub softcap: Option<f32>,
    /// A learned score for each head that takes its share of the softmax and adds nothing
    /// (`[n_heads]`, gpt-oss).
    pub sinks: Option<Array>,
}

/// Norms of queries, keys and values before rotation.
#[derive(Debug, Clone, Default)]
pub struct HeadNorms {
    /// Of queries.
    pub q: Option<Norm>,
    /// Of keys.
    pub k: Option<Norm>,
    /// Of values (Gemma 4).
    pub v: Option<Norm>,
    /// Over all heads together instead of each (OLMo 2).
    pub across_heads: bool,
}

/// Which positions of a prefill the caller needs the outputs of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// Every one.
    All,
    /// Only the last; keys and values of all are stored nevertheless.
    Last,
}

impl Positions {
    /// The positions of `x` `[B, L, ..]` that are asked for.
    ///
    /// # Errors
    /// When `x` has fewer than two axes.
    pub fn of(self, x: &Array) -> Result<Array> {
        let length = x.dim(1)?;
        match self {
            Positions::Last if length > 1 => x.slice_axis(1, length - 1, length),
            _ => Ok(x.clone()),
        }
    }
}

/// Keys and values that queries look at, and where the queries stand.
#[derive(Debug, Clone)]
pub struct Seen {
    /// `[B, Hkv, total, D]`.
    pub keys: Array,
    /// `[B, Hkv, total, D]`.
    pub values: Array,
    /// Positions before those of this call.
    pub offset: i32,
}

impl Attention {
    /// `x` `[B, L, hidden]` to `[B, L or 1, hidden]`; keys and values of `x` are added to `cache`.
    ///
    /// # Errors
    /// When shapes do not fit or the cache is full.
    pub fn forward(
        &self,
        x: &Array,
        cache: &mut dyn KvCache,
        positions: Positions,
    ) -> Result<Array> {
        let seen = self.remember(x, cache)?;
        self.look(x, &seen, positions)
    }

    /// Adds keys and values of `x` to `cache`, and returns all there are.
    ///
    /// # Errors
    /// When shapes do not fit, or this layer has no keys of its own.
    pub fn remember(&self, x: &Array, cache: &mut dyn KvCache) -> Result<Seen> {
        let offset = cache.offset();
        let total = offset + x.dim(1)?;
        let Some(k_proj) = &self.k_proj else {
            return Err(mlx_rs_core::Error::new(
                mlx_rs_core::ErrorKind::Value,
                "attention",
                "a layer without keys of its own needs those of another",
            ));
        };
        let n = self.n_kv_heads;
        let projected = k_proj.forward(x)?;
        let keys = self.heads(&projected, n, self.norms.k.as_ref())?;
        let keys = self.rotate(&keys, offset, total)?;
        let values = match &self.v_proj {
            Some(v_proj) => v_proj.forward(x)?,
            None => projected,
        };
        let values = self.heads(&values, n, self.norms.v.as_ref())?;
        let (keys, values) = cache.update(&keys, &values)?;
        Ok(Seen {
            keys,
            values,
            offset,
        })
    }

    /// What the queries of `x` `[B, L, hidden]` find in `seen`: `[B, L or 1, hidden]`.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn look(&self, x: &Array, seen: &Seen, positions: Positions) -> Result<Array> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let total = seen.offset + length;
        let q_input = positions.of(x)?;
        let q_length = q_input.dim(1)?;
        let q_offset = total - q_length;
        let queries = self.q_proj.forward(&q_input)?;
        let queries = self.heads(&queries, self.n_heads, self.norms.q.as_ref())?;
        let queries = self.rotate(&queries, q_offset, total)?;

        let out = self.attend(&queries, &seen.keys, &seen.values, q_offset, q_length)?;
        // [B, H, L, D] -> [B, L, H*D]
        let out = out.transpose_axes(&[0, 2, 1, 3])?.reshape(&[
            batch,
            q_length,
            self.n_heads * self.head_dim,
        ])?;
        self.o_proj.forward(&out)
    }

    fn rotate(&self, x: &Array, offset: i32, total: i32) -> Result<Array> {
        match &self.rope {
            Some(rope) => rope.forward(x, offset, total),
            None => Ok(x.clone()),
        }
    }

    /// Cuts a projection into heads: `[B, L, H*D] -> [B, H, L, D]`.
    fn heads(&self, projected: &Array, n: i32, norm: Option<&Norm>) -> Result<Array> {
        let (batch, length) = (projected.dim(0)?, projected.dim(1)?);
        let shape = [batch, length, n, self.head_dim];
        let heads = if self.norms.across_heads {
            through(norm, projected)?.reshape(&shape)?
        } else {
            through(norm, &projected.reshape(&shape)?)?
        };
        heads.transpose_axes(&[0, 2, 1, 3])
    }

    fn attend(
        &self,
        queries: &Array,
        keys: &Array,
        values: &Array,
        offset: i32,
        length: i32,
    ) -> Result<Array> {
        let total = keys.dim(2)?;
        let (keys, values, mask) = match self.window {
            Some(window) if total > window && length == 1 => {
                // One query: what it may see is the tail.
                let tail = |a: &Array| a.slice_axis(2, total - window, total);
                (tail(keys)?, tail(values)?, Sight::Everything)
            }
            Some(window) if total > window => (
                keys.clone(),
                values.clone(),
                Sight::Mask(window_mask(offset, length, total, window)?),
            ),
            _ if length == 1 => (keys.clone(), values.clone(), Sight::Everything),
            _ => (keys.clone(), values.clone(), Sight::Past),
        };
        if self.softcap.is_some() || self.sinks.is_some() {
            let mask = match mask {
                Sight::Everything => None,
                Sight::Past => Some(window_mask(offset, length, total, i32::MAX)?),
                Sight::Mask(mask) => Some(mask),
            };
            return self.attend_in_steps(queries, &keys, &values, mask.as_ref());
        }
        let mask = match &mask {
            Sight::Everything => fast::Mask::None,
            Sight::Past => fast::Mask::Causal,
            Sight::Mask(mask) => fast::Mask::Array(mask),
        };
        fast::scaled_dot_product_attention(queries, &keys, &values, self.scale, mask)
    }

    /// The same with a cap on the scores or with sinks, which MLX's fused kernel does not have.
    fn attend_in_steps(
        &self,
        queries: &Array,
        keys: &Array,
        values: &Array,
        mask: Option<&Array>,
    ) -> Result<Array> {
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
        let mut scores = queries.matmul(&keys.expand_dims(2)?.swap_axes(-1, -2)?)?;
        if let Some(cap) = self.softcap {
            let cap = scalar(cap)?;
            scores = scores.divide(&cap)?.tanh()?.multiply(&cap)?;
        }
        if let Some(mask) = mask {
            let least = match scores.dtype() {
                Dtype::Float16 => f32::from(half::f16::MIN),
                Dtype::Bfloat16 => f32::from(half::bf16::MIN),
                _ => f32::MIN,
            };
            scores = where_(mask, &scores, &scalar(least)?)?;
        }
        let shares = match &self.sinks {
            None => scores.softmax(-1, true)?,
            Some(sinks) => {
                let sinks = sinks
                    .astype(scores.dtype())?
                    .reshape(&[1, groups, repeats, 1, 1])?
                    .broadcast_to(&[batch, groups, repeats, length, 1])?;
                let total = scores.dim(-1)?;
                concatenate(&[&scores, &sinks], -1)?
                    .softmax(-1, true)?
                    .slice_axis(-1, 0, total)?
            }
        };
        shares.matmul(&values.expand_dims(2)?)?.reshape(&[
            batch,
            self.n_heads,
            length,
            self.head_dim,
        ])
    }
}

/// What a query may look at.
enum Sight {
    Everything,
    /// What is not after it.
    Past,
    Mask(Array),
}

/// Boolean `[length, total]`: query at position `p` sees keys in `(p - window, p]`.
fn window_mask(offset: i32, length: i32, total: i32, window: i32) -> Result<Array> {
    let range = |start: i32, n: i32| {
        mlx_rs_core::arange(
            f64::from(start),
            f64::from(start) + f64::from(n),
            1.0,
            Dtype::Int32,
        )
    };
    let queries = range(offset, length)?.expand_dims(1)?;
    let keys = range(0, total)?.expand_dims(0)?;
    let causal = keys.less_equal(&queries)?;
    if window >= total {
        return Ok(causal);
    }
    let near = keys.add(&Array::scalar(window)?)?.greater(&queries)?;
    causal.logical_and(&near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_mask_is_causal_and_near() {
        let mask = window_mask(2, 3, 5, 2).unwrap().to_vec::<bool>().unwrap();
        let expected = [
            [false, true, true, false, false],
            [false, false, true, true, false],
            [false, false, false, true, true],
        ];
        assert_eq!(mask, expected.concat());
        let mask = window_mask(0, 2, 2, i32::MAX).unwrap();
        assert_eq!(mask.to_vec::<bool>().unwrap(), [true, false, true, true]);
    }
}
