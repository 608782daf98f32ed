//! Phi-3 and Phi-4-mini (Abdin et al. 2024; reference: `modeling_phi3` of Hugging Face
//! transformers). It is the llama decoder with fused QKV and gate-up projections, and LongRoPE
//! scaling.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::Activation;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            fused: true,
            ..AttentionParts::default()
        };
        let attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
        let mlp = b.fused_mlp(&format!("{prefix}.mlp"), activation)?;
        b.pre_norm_block(prefix, attention, mlp)
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
