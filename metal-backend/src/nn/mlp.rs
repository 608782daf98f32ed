//! Dense feed-forward blocks. `moe.rs` has mixtures of experts; `feed_forward.rs` selects the kind.

use mlx_rs_core::{Array, Result};

use super::linear::{Linear, project};
use super::norm::{Norm, through};
use crate::exec::{Activation, Epilogue, ExpertGate};

/// A gated feed-forward block: `down(act(gate(x)) * up(x))` (SwiGLU and variants, Shazeer 2020).
#[derive(Debug, Clone)]
pub struct GatedMlp {
    /// `[hidden] -> [intermediate]`, before the activation.
    pub gate: Linear,
    /// `[hidden] -> [intermediate]`.
    pub up: Linear,
    /// `[intermediate] -> [hidden]`.
    pub down: Linear,
    /// The gate's activation.
    pub activation: Activation,
}

impl GatedMlp {
    /// Maps `[.., hidden]` to `[.., hidden]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.forward_from(None, x, None)
    }

    /// Computes `forward(norm(x)) + add`. `norm` and `add` are optional.
    pub fn forward_from(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        add: Option<&Array>,
    ) -> Result<Array> {
        let y = self.activations(norm, x)?;
        self.down.forward_from(None, &y, add)
    }

    /// Whether an adapter changes one of the block's matrices.
    pub fn is_adapted(&self) -> bool {
        [&self.gate, &self.up, &self.down]
            .into_iter()
            .any(Linear::is_adapted)
    }

    /// Returns the input of the down projection, `[.., intermediate]`.
    pub fn activations(&self, norm: Option<&Norm>, x: &Array) -> Result<Array> {
        let gate = Epilogue::Gate(self.activation);
        if let Some(y) = project(&[&self.gate, &self.up], norm, gate, x)? {
            return Ok(y);
        }
        let x = through(norm, x)?;
        let gate = self.activation.apply(&self.gate.forward(&x)?)?;
        gate.multiply(&self.up.forward(&x)?)
    }
}

/// A gated feed-forward block with factors `d` and `g`: `d * down(act(g * gate(x)) * up(x))`
/// (Falcon-H1).
#[derive(Debug, Clone)]
pub struct ScaledMlp {
    /// The gated feed-forward block without factors.
    pub mlp: GatedMlp,
    /// The factor on the gate, before the activation function.
    pub gate: Array,
    /// The factor on the output.
    pub down: Array,
}

impl ScaledMlp {
    /// Maps `[.., hidden]` to `[.., hidden]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        let y = self.activations(x)?;
        self.mlp.down.forward(&y)?.multiply(&self.down)
    }

    /// Returns the input of the down projection, `[.., intermediate]`.
    pub fn activations(&self, x: &Array) -> Result<Array> {
        let GatedMlp {
            gate,
            up,
            activation,
            ..
        } = &self.mlp;
        let gate = activation.apply(&gate.forward(x)?.multiply(&self.gate)?)?;
        gate.multiply(&up.forward(x)?)
    }
}

/// A gated feed-forward block that limits `act(gate(x))` and `up(x)` before their product (Step
/// 3.5).
#[derive(Debug, Clone)]
pub struct LimitedMlp {
    /// The gated feed-forward block without limits.
    pub mlp: GatedMlp,
    /// The limit of both factors; see [`ExpertGate::Limited`].
    pub limit: f32,
}

impl LimitedMlp {
    /// Maps `[.., hidden]` to `[.., hidden]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.mlp.down.forward(&self.activations(x)?)
    }

    /// Returns the input of the down projection, `[.., intermediate]`.
    pub fn activations(&self, x: &Array) -> Result<Array> {
        let gate = ExpertGate::Limited {
            activation: self.mlp.activation,
            limit: self.limit,
        };
        gate.apply(&self.mlp.gate.forward(x)?, &self.mlp.up.forward(x)?)
    }
}

/// A feed-forward block without a gate: `down(act(up(x)))`.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// `[hidden] -> [intermediate]`.
    pub up: Linear,
    /// `[intermediate] -> [hidden]`.
    pub down: Linear,
    /// The activation function between the two matrices.
    pub activation: Activation,
}

impl Mlp {
    /// Whether an adapter changes one of the block's matrices.
    pub fn is_adapted(&self) -> bool {
        self.up.is_adapted() || self.down.is_adapted()
    }

    /// Maps `[.., hidden]` to `[.., hidden]`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.forward_from(x, None)
    }

    /// Computes `forward(x) + add`; `add` is optional.
    pub fn forward_from(&self, x: &Array, add: Option<&Array>) -> Result<Array> {
        let activate = Epilogue::Activate(self.activation);
        let y = match project(&[&self.up], None, activate, x)? {
            Some(y) => y,
            None => self.activation.apply(&self.up.forward(x)?)?,
        };
        self.down.forward_from(None, &y, add)
    }
}
