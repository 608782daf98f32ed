//! Normalization of each head of a recurrent layer, with one weight per element of all heads. The
//! norm is a group norm (Wu and He 2018, with heads as groups) or an RMS norm.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, fast};

use super::adapter::ParamSlot;

/// A norm over the elements of each head.
#[derive(Debug, Clone)]
pub struct HeadNorm {
    /// The weight, `[heads * dim]`.
    pub weight: Array,
    /// The optional bias, `[heads * dim]`.
    pub bias: Option<Array>,
    /// The slot through which the weight can be trained.
    pub slot: Arc<ParamSlot>,
    /// Epsilon.
    pub eps: f32,
    /// Whether the norm first subtracts the mean.
    pub centered: bool,
}

impl HeadNorm {
    /// Maps `[.., heads, dim]` to `[.., heads * dim]` in `dtype`. Computes the norm in float32.
    ///
    /// # Errors
    /// If `x` has another number of elements per position than the weight.
    pub fn forward(&self, x: &Array, dtype: Dtype) -> Result<Array> {
        let x = x.astype(Dtype::Float32)?;
        let normed = if self.centered {
            fast::layer_norm(&x, None, None, self.eps)?
        } else {
            fast::rms_norm(&x, None, self.eps)?
        };
        let flat = match x.shape() {
            [rest @ .., heads, dim] => normed.reshape(&[rest, &[heads * dim]].concat())?,
            _ => normed,
        };
        let trained = self.slot.vector(dtype)?;
        let y = (flat.astype(dtype)?).multiply(trained.as_ref().unwrap_or(&self.weight))?;
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}
