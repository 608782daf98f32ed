//! Normalization layers.

use mlx_rs_core::{Array, Result, fast};

/// Normalization over the last axis.
#[derive(Debug, Clone)]
pub enum Norm {
    /// By the root of the mean square (Zhang and Sennrich 2019).
    Rms {
        /// `[dim]`; `None` for ones.
        weight: Option<Array>,
        /// Added under the root.
        eps: f32,
    },
    /// By mean and variance (Ba et al. 2016).
    Layer {
        /// `[dim]`.
        weight: Array,
        /// `[dim]`.
        bias: Option<Array>,
        /// Added under the root.
        eps: f32,
    },
}

impl Norm {
    /// `[.., dim] -> [.., dim]`.
    ///
    /// # Errors
    /// When `x` does not end in the weight's dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Norm::Rms { weight, eps } => fast::rms_norm(x, weight.as_ref(), *eps),
            Norm::Layer { weight, bias, eps } => {
                fast::layer_norm(x, Some(weight), bias.as_ref(), *eps)
            }
        }
    }
}

/// Through a norm, where there is one.
///
/// # Errors
/// As [`Norm::forward`].
pub fn through(norm: Option<&Norm>, x: &Array) -> Result<Array> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.clone()),
    }
}
