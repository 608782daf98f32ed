//! OLMo 2 (OLMo Team 2025; reference: `modeling_olmo2` of Hugging Face transformers). Norms follow
//! attention and feed-forward instead of preceding them; query and key norms span all heads.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let dims = b.dims;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.norms = b.wide_head_norms(&at)?;
        let bias = b.config.mlp_bias;
        let mlp = b.gated_mlp(
            &format!("{prefix}.mlp"),
            dims.intermediate,
            activation,
            bias,
        )?;
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
