//! Granite (IBM 2024; reference: `modeling_granite` of Hugging Face transformers). It is the llama
//! decoder with factors on the embedding, the scores, the residual branches, and the logits.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::llama::{Variant, parts};
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let residual = b.factor("residual_multiplier")?;
    let scale = config.number("attention_multiplier")?.unwrap_or(1.0);
    let variant = Variant {
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        ..Variant::default()
    };
    let blocks = b.blocks(|b, i, prefix| {
        let mut attention = b.attention(i, &format!("{prefix}.self_attn"), parts(variant))?;
        attention.scale = scale;
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(
            &format!("{prefix}.mlp"),
            width,
            activation,
            variant.mlp_bias,
        )?;
        Ok(Block {
            residual: residual.clone(),
            ..b.pre_norm_block(prefix, attention, FeedForward::Gated(mlp))?
        })
    })?;
    let mut head = b.head(None)?;
    let divisor = config.number("logits_scaling")?.unwrap_or(1.0);
    if divisor != 1.0 {
        head.scale = Some(b.scalar(1.0 / divisor)?);
    }
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: b.factor("embedding_multiplier")?,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}
