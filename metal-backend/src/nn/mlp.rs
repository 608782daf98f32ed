//! The gated feed-forward block of llama-like models (SwiGLU, Shazeer 2020).

use mlx_rs_core::{Array, Result};

use super::linear::Linear;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// `[hidden] -> [intermediate]`, through the activation.
    pub gate: Linear,
    /// `[hidden] -> [intermediate]`.
    pub up: Linear,
    /// `[intermediate] -> [hidden]`.
    pub down: Linear,
}

impl GatedMlp {
    /// `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let gate = self.gate.forward(x)?.silu()?;
        self.down.forward(&gate.multiply(&self.up.forward(x)?)?)
    }
}
