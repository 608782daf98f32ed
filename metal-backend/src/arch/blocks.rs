//! Builds the blocks of a decoder, from their parts.

use std::sync::Arc;

use inference::Result;
use inference_formats::family::Recurrence;

use super::build::Builder;
use super::stack::{Block, Blocks};
use super::stage::Stage;
use crate::nn::{FeedForward, Mixer};

impl Builder<'_> {
    /// A block without a feed-forward part: a norm at `norm` below `prefix`, and the layer.
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

    /// A block with a norm before each part: `input_layernorm` and `post_attention_layernorm`.
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

    /// A block with a norm after each part: `post_attention_layernorm` and
    /// `post_feedforward_layernorm`.
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

    /// Builds every block of this process. `make` receives the block's index in the model and its
    /// prefix.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn blocks<M: Mixer>(
        &mut self,
        one: impl FnMut(&mut Self, usize, &str) -> Result<Block<M>>,
    ) -> Result<Blocks<M>> {
        self.blocks_at("model.layers.", one)
    }

    /// As [`Self::blocks`], for blocks with another prefix, which the index follows.
    ///
    /// # Errors
    /// The errors of `make`.
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
