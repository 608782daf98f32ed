//! Builds the blocks of a decoder from mixers, feed-forward parts and norms.

use std::sync::Arc;

use inference::Result;
use inference_formats::family::Recurrence;

use super::build::Builder;
use super::stack::{Block, Blocks};
use super::stage::Stage;
use crate::nn::{FeedForward, Mixer};

impl Builder<'_> {
    /// Returns a block without a feed-forward part. Its norm is `{prefix}.norm`.
    pub fn mixer_block<M: Mixer>(&mut self, prefix: &str, mixer: M) -> Result<Block<M>> {
        Ok(Block {
            mixer_in: Some(self.hidden_norm(&format!("{prefix}.norm"))?),
            mixer,
            mixer_out: None,
            mlp_in: None,
            mlp: FeedForward::Nothing,
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    }

    /// Returns a block with a norm before the mixer, `input_layernorm`, and a norm before the
    /// feed-forward part, `post_attention_layernorm`.
    pub fn pre_norm_block<M: Mixer>(
        &mut self,
        prefix: &str,
        mixer: M,
        mlp: FeedForward,
    ) -> Result<Block<M>> {
        Ok(Block {
            mixer_in: Some(self.hidden_norm(&format!("{prefix}.input_layernorm"))?),
            mixer,
            mixer_out: None,
            mlp_in: Some(self.hidden_norm(&format!("{prefix}.post_attention_layernorm"))?),
            mlp,
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    }

    /// Returns a block with a norm after the mixer, `post_attention_layernorm`, and a norm after
    /// the feed-forward part, `post_feedforward_layernorm`.
    pub fn post_norm_block<M: Mixer>(
        &mut self,
        prefix: &str,
        mixer: M,
        mlp: FeedForward,
    ) -> Result<Block<M>> {
        let mut norm = |part: &str| self.hidden_norm(&format!("{prefix}.{part}")).map(Some);
        Ok(Block {
            mixer_in: None,
            mixer,
            mixer_out: norm("post_attention_layernorm")?,
            mlp_in: None,
            mlp,
            mlp_out: norm("post_feedforward_layernorm")?,
            residual: None,
            parallel: false,
        })
    }

    /// Builds every block of this process. `one` receives the block's index in the model and the
    /// prefix of its tensor names.
    ///
    /// # Errors
    /// The errors of `one`.
    pub fn blocks<M: Mixer>(
        &mut self,
        one: impl FnMut(&mut Self, usize, &str) -> Result<Block<M>>,
    ) -> Result<Blocks<M>> {
        self.blocks_at("model.layers.", one)
    }

    /// Builds the blocks as [`Self::blocks`] does, with the prefix `before` followed by the block's
    /// index.
    ///
    /// # Errors
    /// The errors of `one`.
    pub fn blocks_at<M: Mixer>(
        &mut self,
        before: &str,
        mut one: impl FnMut(&mut Self, usize, &str) -> Result<Block<M>>,
    ) -> Result<Blocks<M>> {
        let (hidden, dtype) = (self.dims.hidden, self.weights.dtype());
        let (layers, stage) = match self.weights.stage() {
            Some(part) => {
                let family = self.config.family();
                let recurrent = family.is_some_and(|f| f.recurrence != Recurrence::None);
                let stage = Stage::new(part.group, hidden, dtype, recurrent);
                (part.layers(), Some(stage))
            }
            None => (0..self.config.num_hidden_layers, None),
        };
        let blocks = layers
            .map(|i| one(self, i, &format!("{before}{i}")).map(Arc::new))
            .collect::<Result<_>>()?;
        Ok(Blocks { blocks, stage })
    }
}
