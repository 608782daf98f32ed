//! EXAONE 4 (LG AI Research 2025; reference: `modeling_exaone4` of Hugging Face transformers).
//! Norms are on the outputs of attention and feed-forward and on query and key heads. In a model
//! with a sliding window, only the sliding layers have rotary embeddings. Without a window, all
//! layers have them.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let hybrid = config.sliding_window.is_some();
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            no_rope: hybrid && !b.config.slides(i),
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.norms = b.head_norms(&at)?;
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, activation, false)?;
        b.post_norm_block(prefix, attention, FeedForward::Gated(mlp))
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}
