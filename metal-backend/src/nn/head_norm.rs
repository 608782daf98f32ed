//! Normalization of each head of a recurrent layer by mean and variance, with one factor an element
//! of all heads (Wu and He 2018, with heads as groups).

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, fast};

use super::adapter::ParamSlot;

/// A norm over the elements of each head.
#[derive(Debug, Clone)]
pub struct HeadNorm {
    /// `[heads * dim]`, after the norm.
    pub weight: Array,
    /// Where its weight can be trained.
    pub slot: Arc<ParamSlot>,
    /// Added under the root.
    pub eps: f32,
}

impl HeadNorm {
    /// `[.., heads, dim] -> [.., heads * dim]` in `dtype`. The reduction is in float32.
    ///
    /// # Errors
    /// When `x` does not have as many elements as the weight.
    pub fn forward(&self, x: &Array, dtype: Dtype) -> Result<Array> {
        let normed = fast::layer_norm(&x.astype(Dtype::Float32)?, None, None, self.eps)?;
        let flat = match x.shape() {
            [rest @ .., heads, dim] => normed.reshape(&[rest, &[heads * dim]].concat())?,
            _ => normed,
        };
        let own = self.slot.vector(dtype)?;
        flat.astype(dtype)?
            .multiply(own.as_ref().unwrap_or(&self.weight))
    }
}
