//! Bidirectional attention of encoders over packed sequences. A position attends to its whole
//! sequence, or to its neighbors on both sides. There is no cache and no causal mask.

use inference::AttentionSums;
use mlx_rs_core::{Array, Dtype, Result, arange, concatenate, fast};

use super::attention::Attention;
use super::linear::project;
use super::norm::{Norm, through};
use crate::cache::Stored;
use crate::exec::Epilogue;

impl Attention {
    /// Computes attention for `x` `[1, T, hidden]`, after `norm` if there is one: `[1, T, hidden]`.
    /// `x` packs sequences of these lengths. A position attends only to positions of its own
    /// sequence, at most `reach` apart. If `add` is set, the result is added to `x`.
    /// [`Attention::window`] is ignored.
    pub fn encode(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        lengths: &[i32],
        reach: Option<i32>,
    ) -> Result<Array> {
        let residual = add.then_some(x);
        if let Some(attended) = self.encode_fused((x, norm), lengths, reach)? {
            return self.o_proj.forward_from(None, &attended, residual);
        }
        let x = through(norm, x)?;
        let n = self.n_kv_heads;
        let q = self.heads(
            &self.q_proj.forward(&x)?,
            self.n_heads,
            self.norms.q.as_ref(),
        )?;
        let keys = match &self.k_proj {
            Some(k_proj) => k_proj.forward(&x)?,
            None => return Err(missing()),
        };
        let values = match &self.v_proj {
            Some(v_proj) => v_proj.forward(&x)?,
            None => return Err(missing()),
        };
        let k = self.heads(&keys, n, self.norms.k.as_ref())?;
        let v = self.heads(&values, n, self.norms.v.as_ref())?;
        let width = self.n_heads * self.head_dim;
        let mut from = 0;
        let mut attended = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let of_sequence = |a: &Array| match lengths {
                [_] => Ok(a.clone()),
                _ => a.slice_axis(2, from, from + length),
            };
            let (q, k) = (of_sequence(&q)?, of_sequence(&k)?);
            let (q, k) = (self.rotate(&q, 0, length)?, self.rotate(&k, 0, length)?);
            let mask = reach.filter(|&n| n < length - 1);
            let mask = mask.map(|n| near(length, n)).transpose()?;
            let v = of_sequence(&v)?;
            let one = if self.sums == AttentionSums::Native {
                let mask = mask.as_ref().map_or(fast::Mask::None, fast::Mask::Array);
                fast::scaled_dot_product_attention(&q, &k, &v, self.scale, mask)?
            } else {
                self.attend_in_steps(&q, &Stored::Plain(k), &Stored::Plain(v), mask.as_ref())?
            };
            // [1, H, L, D] -> [1, L, H * D]
            attended.push(
                one.transpose_axes(&[0, 2, 1, 3])?
                    .reshape(&[1, length, width])?,
            );
            from += length;
        }
        let attended = match attended.as_slice() {
            [one] => one.clone(),
            several => concatenate(&several.iter().collect::<Vec<_>>(), 1)?,
        };
        self.o_proj.forward_from(None, &attended, residual)
    }

    /// The attention output of the queries, `[1, T, H * D]`, computed by our kernels; `None` if the
    /// kernels do not support this layer.
    fn encode_fused(
        &self,
        (x, norm): (&Array, Option<&Norm>),
        lengths: &[i32],
        reach: Option<i32>,
    ) -> Result<Option<Array>> {
        let (Some(heads), Some(k_proj), Some(v_proj)) =
            (self.spec().heads(), &self.k_proj, &self.v_proj)
        else {
            return Ok(None);
        };
        let layers = [&self.q_proj, k_proj, v_proj];
        let packed = match project(&layers, norm, Epilogue::None, x)? {
            Some(packed) => packed,
            // Kernels fuse only RMS norms into a projection. Any other norm runs first.
            None => match project(&layers, None, Epilogue::None, &through(norm, x)?)? {
                Some(packed) => packed,
                None => return Ok(None),
            },
        };
        heads.attend_around(&packed, lengths, reach).map(Some)
    }
}

fn missing() -> mlx_rs_core::Error {
    let message = "a layer of an encoder has keys and values of its own";
    mlx_rs_core::Error::new(mlx_rs_core::ErrorKind::Value, "attention", message)
}

/// Boolean `[length, length]`: whether two positions are at most `reach` apart.
fn near(length: i32, reach: i32) -> Result<Array> {
    let places = arange(0.0, f64::from(length), 1.0, Dtype::Int32)?;
    let apart = places.expand_dims(1)?.subtract(&places.expand_dims(0)?)?;
    apart.abs()?.less_equal(&Array::scalar(reach)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_near_on_both_sides() {
        let actual = near(4, 1).unwrap().to_vec::<bool>().unwrap();
        let expected = [
            [true, true, false, false],
            [true, true, true, false],
            [false, true, true, true],
            [false, false, true, true],
        ];
        assert_eq!(actual, expected.concat());
    }
}
