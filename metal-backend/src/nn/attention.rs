//! Grouped-query self-attention with rotary positions and a cache (Vaswani et al. 2017, Ainslie et
//! al. 2023). Variants (biases, query/key norms, sliding windows) are fields, not copies.

use mlx_rs_core::{Array, Result, fast};

use super::{Linear, RmsNorm, Rope};
use crate::cache::KvCache;

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    /// `[hidden] -> [n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[hidden] -> [n_kv_heads * head_dim]`.
    pub k_proj: Linear,
    /// `[hidden] -> [n_kv_heads * head_dim]`.
    pub v_proj: Linear,
    /// `[n_heads * head_dim] -> [hidden]`.
    pub o_proj: Linear,
    /// Norm of each query head before rotation (qwen3).
    pub q_norm: Option<RmsNorm>,
    /// Norm of each key head before rotation (qwen3).
    pub k_norm: Option<RmsNorm>,
    /// Rotary positions.
    pub rope: Rope,
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
}

/// Which positions of a prefill the caller needs the outputs of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// Every one.
    All,
    /// Only the last; keys and values of all are stored nevertheless.
    Last,
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
        let offset = cache.offset();
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let keys = self.heads(&self.k_proj, x, self.n_kv_heads, self.k_norm.as_ref())?;
        let keys = self.rope.forward(&keys, offset)?;
        let values = self.heads(&self.v_proj, x, self.n_kv_heads, None)?;
        let (keys, values) = cache.update(&keys, &values)?;

        let (q_input, q_offset, q_length) = match positions {
            Positions::Last if length > 1 => {
                (x.slice_axis(1, length - 1, length)?, offset + length - 1, 1)
            }
            _ => (x.clone(), offset, length),
        };
        let queries = self.heads(&self.q_proj, &q_input, self.n_heads, self.q_norm.as_ref())?;
        let queries = self.rope.forward(&queries, q_offset)?;

        let out = self.attend(&queries, &keys, &values, q_offset, q_length)?;
        // [B, H, L, D] -> [B, L, H*D]
        let out = out.transpose_axes(&[0, 2, 1, 3])?.reshape(&[
            batch,
            q_length,
            self.n_heads * self.head_dim,
        ])?;
        self.o_proj.forward(&out)
    }

    /// Projects and cuts into heads: `[B, L, hidden] -> [B, H, L, D]`.
    fn heads(&self, proj: &Linear, x: &Array, n: i32, norm: Option<&RmsNorm>) -> Result<Array> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let mut heads = proj
            .forward(x)?
            .reshape(&[batch, length, n, self.head_dim])?;
        if let Some(norm) = norm {
            heads = norm.forward(&heads)?;
        }
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
        let attend = |k: &Array, v: &Array, mask: fast::Mask<'_>| {
            fast::scaled_dot_product_attention(queries, k, v, self.scale, mask)
        };
        let total = keys.dim(2)?;
        match self.window {
            Some(window) if total > window => {
                if length == 1 {
                    // One query: what it may see is the tail.
                    let tail = |a: &Array| a.slice_axis(2, total - window, total);
                    attend(&tail(keys)?, &tail(values)?, fast::Mask::None)
                } else {
                    let mask = window_mask(offset, length, total, window)?;
                    attend(keys, values, fast::Mask::Array(&mask))
                }
            }
            _ if length == 1 => attend(keys, values, fast::Mask::None),
            _ => attend(keys, values, fast::Mask::Causal),
        }
    }
}

/// Boolean `[length, total]`: query at position `p` sees keys in `(p - window, p]`.
fn window_mask(offset: i32, length: i32, total: i32, window: i32) -> Result<Array> {
    let range = |start: i32, n: i32| {
        mlx_rs_core::arange(
            f64::from(start),
            f64::from(start) + f64::from(n),
            1.0,
            mlx_rs_core::Dtype::Int32,
        )
    };
    let queries = range(offset, length)?.expand_dims(1)?;
    let keys = range(0, total)?.expand_dims(0)?;
    let causal = keys.less_equal(&queries)?;
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
    }
}
