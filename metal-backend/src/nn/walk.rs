//! A feed-forward block whose features are stored outside the checkpoint. A pass reads only the
//! rows of the features that it selects for each position.

use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::adapter;
use super::feed_forward::{FeedForward, FfnBackend, FfnPart};
use super::linear::Linear;
use crate::exec::FeatureRows;

/// Computes the `top_k` features with the greatest gate magnitude at each position. The magnitude
/// is that of the activation function's input. If the model loads a gate matrix, possibly
/// quantized, it is used. All other weights come from the external features.
#[derive(Debug)]
pub struct WalkRows {
    rows: FeatureRows,
    top_k: usize,
}

impl WalkRows {
    /// Creates the block for `part`'s layer from its features. Each position uses `top_k` of them.
    ///
    /// # Errors
    /// If the features do not match the layer.
    pub fn new(rows: FeatureRows, top_k: usize, part: &FfnPart<'_>) -> Result<Self> {
        let (gated, activation) = match part.dense() {
            FeedForward::Gated(mlp) => (true, mlp.activation),
            FeedForward::Plain(mlp) => (false, mlp.activation),
            _ => return Err(refused(part)),
        };
        if rows.is_gated() != gated || rows.activation() != activation {
            let message = "the vindex has features of another kind";
            return Err(Error::new(ErrorKind::Unsupported, "walk", message));
        }
        Ok(Self { rows, top_k })
    }

    /// Returns the gates of all features: `[.., hidden] -> [.., features]`.
    fn gates(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        let (gate, replaced): (&Linear, &[&Linear]) = match part.dense() {
            FeedForward::Gated(mlp) => (&mlp.gate, &[&mlp.up, &mlp.down]),
            FeedForward::Plain(mlp) => (&mlp.up, &[&mlp.down]),
            _ => return Err(refused(part)),
        };
        if replaced.iter().any(|linear| linear.is_adapted()) {
            let message = "an adapter changes the layer, and the features are without it";
            return Err(Error::new(ErrorKind::Value, "walk", message));
        }
        match gate.is_loaded() {
            true => gate.forward(x),
            false => self.rows.gates(x),
        }
    }
}

/// Whether the model's gate is loaded, so that the features need no gate.
pub fn has_gate(part: &FfnPart<'_>) -> bool {
    match part.dense() {
        FeedForward::Gated(mlp) => mlp.gate.is_loaded(),
        FeedForward::Plain(mlp) => mlp.up.is_loaded(),
        _ => false,
    }
}

impl FfnBackend for WalkRows {
    fn name(&self) -> &str {
        "walk"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        let gates = self.gates(part, x)?;
        let differentiated = adapter::differentiated();
        (self.rows).walk(x, &gates, self.top_k, differentiated)
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let gates = self.gates(part, x)?;
        let y = (self.rows).walk(x, &gates, self.top_k, adapter::differentiated())?;
        Ok((y, self.rows.activations(x, &gates, self.top_k)?))
    }
}

fn refused(part: &FfnPart<'_>) -> Error {
    let why = part.without_features().unwrap_or_default();
    Error::new(ErrorKind::Unsupported, "walk", why)
}
