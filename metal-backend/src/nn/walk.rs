//! A feed-forward part from features that lie one by one outside of the checkpoint: of each position
//! only the chosen ones are read.

use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::adapter;
use super::feed_forward::{FeedForward, FfnStrategy};
use super::linear::Linear;
use crate::exec::FeatureRows;

/// Of each position the `top_k` features with the greatest gate, before the activation, by
/// magnitude. The gate is the layer's own, which may be packed, where it is loaded. All else is the
/// features'.
#[derive(Debug)]
pub struct WalkFfn {
    /// The features.
    pub rows: FeatureRows,
    /// How many of them.
    pub top_k: usize,
}

impl WalkFfn {
    fn walk(&self, x: &Array, gate: &Linear, replaced: &[&Linear]) -> Result<Array> {
        if replaced.iter().any(|linear| linear.is_adapted()) {
            let message = "an adapter changes the layer, and the features are without it";
            return Err(Error::new(ErrorKind::Value, "walk", message));
        }
        // [.., hidden] -> [.., features]
        let gates = match gate.is_loaded() {
            true => gate.forward(x)?,
            false => self.rows.gates(x)?,
        };
        let differentiated = adapter::differentiated();
        (self.rows).walk(x, &gates, self.top_k, differentiated)
    }
}

impl FfnStrategy for WalkFfn {
    fn obstacle(&self, own: &FeedForward) -> Option<&'static str> {
        let (gated, activation) = match own {
            FeedForward::Gated(mlp) => (true, mlp.activation),
            FeedForward::Plain(mlp) => (false, mlp.activation),
            FeedForward::Scaled(_) => return Some("its gate and its output have factors"),
            FeedForward::Mixture(_) => return Some("its features are those of several experts"),
            FeedForward::Nothing => return Some("it has no feed-forward part"),
            FeedForward::Routed(_) => return Some("it has another strategy"),
        };
        let same = self.rows.is_gated() == gated && self.rows.activation() == activation;
        (!same).then_some("the vindex has features of another kind")
    }

    fn forward(&self, own: &FeedForward, x: &Array) -> Result<Array> {
        match own {
            FeedForward::Gated(mlp) => self.walk(x, &mlp.gate, &[&mlp.up, &mlp.down]),
            FeedForward::Plain(mlp) => self.walk(x, &mlp.up, &[&mlp.down]),
            other => {
                let why = self.obstacle(other).unwrap_or_default();
                Err(Error::new(ErrorKind::Value, "walk", why))
            }
        }
    }
}
