//! Feed-forward blocks, except mixtures of experts (`moe.rs`).

use mlx_rs_core::{Array, Result};

use super::activation::Activation;
use super::linear::Linear;
use super::moe::Mixture;

/// What follows the attention in a decoder block.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// With a gate.
    Gated(GatedMlp),
    /// Two matrices.
    Plain(Mlp),
    /// Experts, a few of which see each token.
    Mixture(Box<Mixture>),
}

impl FeedForward {
    /// `[B, L, hidden] -> [B, L, hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Self::Gated(mlp) => mlp.forward(x),
            Self::Plain(mlp) => mlp.forward(x),
            Self::Mixture(mixture) => mixture.forward(x),
        }
    }
}

/// `down(act(gate(x)) * up(x))` (SwiGLU and its kin, Shazeer 2020).
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// `[hidden] -> [intermediate]`, through the activation.
    pub gate: Linear,
    /// `[hidden] -> [intermediate]`.
    pub up: Linear,
    /// `[intermediate] -> [hidden]`.
    pub down: Linear,
    /// Of the gate.
    pub activation: Activation,
}

impl GatedMlp {
    /// `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let gate = self.activation.apply(&self.gate.forward(x)?)?;
        self.down.forward(&gate.multiply(&self.up.forward(x)?)?)
    }
}

/// `down(act(up(x)))`.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// `[hidden] -> [intermediate]`.
    pub up: Linear,
    /// `[intermediate] -> [hidden]`.
    pub down: Linear,
    /// Between the two.
    pub activation: Activation,
}

impl Mlp {
    /// `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.down
            .forward(&self.activation.apply(&self.up.forward(x)?)?)
    }
}
