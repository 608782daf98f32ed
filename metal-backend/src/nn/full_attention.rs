//! Bidirectional attention of encoders over concatenated sequences. A position attends to its
//! complete sequence, or to its neighbors on both sides. There is no cache and no causal mask.

use inference::AttentionSums;
use mlx_rs_core::{Array, Dtype, Result, arange, concatenate, fast, where_};

use super::attention::Attention;
use super::linear::project;
use super::norm::{Norm, through};
use crate::cache::Stored;
use crate::exec::{AttentionSpec, Epilogue, Locality, NormSpec};

impl Attention {
    /// Computes attention for `x` `[1, T, hidden]`, after `norm` if there is one: `[1, T, hidden]`.
    /// `x` concatenates sequences of these lengths. A position attends only to positions of its own
    /// sequence, limited by `locality`. If `add` is set, adds the result to `x`. Ignores
    /// [`Attention::window`].
    pub fn encode(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        lengths: &[i32],
        locality: Locality<'_>,
    ) -> Result<Array> {
        let residual = add.then_some(x);
        if let Some(attended) = self.encode_fused((x, norm), lengths, locality)? {
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
            let mask = mask_of(locality, length)?;
            let v = of_sequence(&v)?;
            let one = if self.sums == AttentionSums::Native {
                let mask = match mask {
                    Some(mask) if mask.dtype() != Dtype::Bool => Some(mask.astype(q.dtype())?),
                    mask => mask,
                };
                let mask = mask.as_ref().map_or(fast::Mask::None, fast::Mask::Array);
                fast::scaled_dot_product_attention(&q, &k, &v, self.scale, mask)?
            } else {
                // The scores have an additional axis for groups of query heads.
                let mask = match mask {
                    Some(mask) if mask.ndim() == 3 => {
                        let shape = [1, n, self.n_heads / n, length, length];
                        Some(mask.reshape(&shape)?)
                    }
                    mask => mask,
                };
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

    /// Returns the attention output of the queries, `[1, T, H * D]`, computed by our kernels;
    /// `None` if the kernels do not support this layer.
    fn encode_fused(
        &self,
        (x, norm): (&Array, Option<&Norm>),
        lengths: &[i32],
        locality: Locality<'_>,
    ) -> Result<Option<Array>> {
        let (Some(k_proj), Some(v_proj)) = (&self.k_proj, &self.v_proj) else {
            return Ok(None);
        };
        if self.norms.across_heads && self.rope.is_none() {
            // The layer has no rotation before these norms, so the norms can run before the kernel.
            let spec = AttentionSpec {
                q_norm: NormSpec::None,
                k_norm: NormSpec::None,
                across_heads: false,
                ..self.spec()
            };
            let Some(heads) = spec.heads() else {
                return Ok(None);
            };
            let x = through(norm, x)?;
            let q = through(self.norms.q.as_ref(), &self.q_proj.forward(&x)?)?;
            let k = through(self.norms.k.as_ref(), &k_proj.forward(&x)?)?;
            let packed = concatenate(&[&q, &k, &v_proj.forward(&x)?], -1)?;
            return heads.attend_around(&packed, lengths, locality).map(Some);
        }
        let Some(heads) = self.spec().heads() else {
            return Ok(None);
        };
        let layers = [&self.q_proj, k_proj, v_proj];
        let packed = match project(&layers, norm, Epilogue::None, x)? {
            Some(packed) => packed,
            // Kernels fuse only RMS norms with a projection, so any other norm runs first.
            None => match project(&layers, None, Epilogue::None, &through(norm, x)?)? {
                Some(packed) => packed,
                None => return Ok(None),
            },
        };
        heads.attend_around(&packed, lengths, locality).map(Some)
    }
}

fn missing() -> mlx_rs_core::Error {
    let message = "a layer of an encoder has keys and values of its own";
    mlx_rs_core::Error::new(mlx_rs_core::ErrorKind::Value, "attention", message)
}

/// Returns the mask of a sequence of `length` positions: boolean `[length, length]`; with slopes,
/// float32 `[H, length, length]`, which is added to scores. `None` if no mask is needed.
fn mask_of(locality: Locality<'_>, length: i32) -> Result<Option<Array>> {
    let Locality { reach, slopes } = locality;
    let mask = reach.filter(|&n| n < length - 1);
    let mask = mask.map(|n| near(length, n)).transpose()?;
    let Some(slopes) = slopes else {
        return Ok(mask);
    };
    let factors: Vec<f32> = slopes.iter().map(|slope| -slope).collect();
    let factors = Array::from_slice(&factors, &[i32::try_from(factors.len()).unwrap_or(0), 1, 1])?;
    let bias = factors.multiply(&apart(length)?.astype(Dtype::Float32)?)?;
    match mask {
        Some(mask) => where_(&mask, &bias, &Array::scalar(f32::NEG_INFINITY)?).map(Some),
        None => Ok(Some(bias)),
    }
}

/// Returns a boolean mask `[length, length]`: whether two positions are at most `reach` apart.
fn near(length: i32, reach: i32) -> Result<Array> {
    apart(length)?.less_equal(&Array::scalar(reach)?)
}

/// Returns the distances of positions, int32 `[length, length]`.
fn apart(length: i32) -> Result<Array> {
    let places = arange(0.0, f64::from(length), 1.0, Dtype::Int32)?;
    let apart = places.expand_dims(1)?.subtract(&places.expand_dims(0)?)?;
    apart.abs()
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

    #[test]
    fn slopes_add_a_bias_for_each_head() {
        let locality = Locality {
            reach: Some(1),
            slopes: Some(&[0.5, 2.0]),
        };
        let actual = mask_of(locality, 3).unwrap().unwrap();
        let hidden = f32::NEG_INFINITY;
        let of = |s: f32| [0.0, -s, hidden, -s, 0.0, -s, hidden, -s, 0.0];
        assert_eq!(actual.shape(), [2, 3, 3]);
        let expected = [of(0.5), of(2.0)].concat();
        assert_eq!(actual.to_vec::<f32>().unwrap(), expected);
        assert!(mask_of(Locality::default(), 3).unwrap().is_none());
    }
}
