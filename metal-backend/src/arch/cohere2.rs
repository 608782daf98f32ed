//! Cohere's Command R7B (Cohere 2024; reference: `modeling_cohere2` of Hugging Face transformers).
//! Attention and feed-forward read the same norm, and their outputs are summed. Sliding layers
//! rotate adjacent pairs; full layers have no rotary embedding. Logits are scaled.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let bias = config.flag("layer_norm_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias });
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            traditional: true,
            no_rope: !b.config.slides(i),
            ..AttentionParts::default()
        };
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, activation, false)?;
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&format!("{prefix}.input_layernorm"))?),
            mixer: b.attention(i, &format!("{prefix}.self_attn"), parts)?,
            mixer_out: None,
            mlp_in: None,
            mlp: FeedForward::Gated(mlp),
            mlp_out: None,
            residual: None,
            parallel: true,
        })
    })?;
    let mut head = b.head(Some(true))?;
    head.scale = b.factor("logit_scale")?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}
