//! GLM-4 (GLM Team 2024; reference: `modeling_glm4` of Hugging Face transformers). Attention and
//! feed-forward each have a norm on their input and on their output. Half of each head rotates, in
//! adjacent pairs. One matrix computes gate and up.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::Activation;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            traditional: true,
            ..AttentionParts::default()
        };
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&format!("{prefix}.input_layernorm"))?),
            mixer: b.attention(i, &format!("{prefix}.self_attn"), parts)?,
            mixer_out: Some(b.hidden_norm(&format!("{prefix}.post_self_attn_layernorm"))?),
            mlp_in: Some(b.hidden_norm(&format!("{prefix}.post_attention_layernorm"))?),
            mlp: b.fused_mlp(&format!("{prefix}.mlp"), activation)?,
            mlp_out: Some(b.hidden_norm(&format!("{prefix}.post_mlp_layernorm"))?),
            residual: None,
            parallel: false,
        })
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
