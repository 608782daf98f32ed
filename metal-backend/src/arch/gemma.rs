//! Gemma (Gemma Team 2024; reference: `modeling_gemma` of Hugging Face transformers). It is the
//! llama decoder with three changes: norms add one to their weight, the embedding is scaled, and
//! the activation of the gate is a tanh GELU.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::RmsPlusOne);
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            ..AttentionParts::default()
        };
        let attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
        let width = b.dims.intermediate;
        // Old files name `gelu`, but the models were trained with the tanh approximation.
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, Activation::GeluTanh, false)?;
        b.pre_norm_block(prefix, attention, FeedForward::Gated(mlp))
    })?;
    let scale = (b.dims.hidden as f32).sqrt();
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: Some(b.scalar(scale)?),
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(Some(true))?,
    }))
}
