//! The feed-forward part of a decoder block, of any kind.

use mlx_rs_core::{Array, Result};

use super::mlp::{GatedMlp, Mlp};
use super::moe::Mixture;
use super::norm::{Norm, through};

/// The part after the attention in a decoder block.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// With a gate.
    Gated(GatedMlp),
    /// Two matrices.
    Plain(Mlp),
    /// Experts, a few of which see each token.
    Mixture(Box<Mixture>),
    /// None: the block ends after its mixer.
    Nothing,
}

impl FeedForward {
    /// `forward(norm(x)) + add`, where there are a norm and something to add:
    /// `[B, L, hidden] -> [B, L, hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward_from(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        add: Option<&Array>,
    ) -> Result<Array> {
        let y = match self {
            Self::Gated(mlp) => return mlp.forward_from(norm, x, add),
            Self::Plain(mlp) => mlp.forward(&through(norm, x)?)?,
            Self::Mixture(mixture) => mixture.forward(&through(norm, x)?)?,
            Self::Nothing => return add.map_or_else(|| x.zeros_like(), |add| Ok(add.clone())),
        };
        match add {
            Some(add) => add.add(&y),
            None => Ok(y),
        }
    }
}
