//! Normalization layers.

use mlx_rs_core::{Array, Result, fast};

/// Root-mean-square normalization over the last axis.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Array,
    eps: f32,
}

impl RmsNorm {
    /// From a weight `[dim]` and the epsilon under the root.
    pub fn new(weight: Array, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// `[.., dim] -> [.., dim]`.
    ///
    /// # Errors
    /// When `x` does not end in the weight's dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        fast::rms_norm(x, Some(&self.weight), self.eps)
    }
}
