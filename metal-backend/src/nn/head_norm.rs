//! Normalization of each head of a recurrent layer, by mean and variance (Wu and He 2018, with heads
//! as groups) or by the root of the mean square, with one factor an element of all heads.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, fast};

use super::adapter::ParamSlot;

/// A norm over the elements of each head.
#[derive(Debug, Clone)]
pub struct HeadNorm {
    /// `[heads * dim]`, after the norm.
    pub weight: Array,
    /// `[heads * dim]`, added at the end, where there is one.
    pub bias: Option<Array>,
    /// Where its weight can be trained.
    pub slot: Arc<ParamSlot>,
    /// Added under the root.
    pub eps: f32,
    /// The mean is taken off first.
    pub centered: bool,
}

impl HeadNorm {
    /// `[.., heads, dim] -> [.., heads * dim]` in `dtype`. The reduction is in float32.
    ///
    /// # Errors
    /// When `x` does not have as many elements as the weight.
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
        let own = self.slot.vector(dtype)?;
        let y = (flat.astype(dtype)?).multiply(own.as_ref().unwrap_or(&self.weight))?;
        match &self.bias {
            Some(bias) => y.add(bias),
            None => Ok(y),
        }
    }
}
