//! Llama (Touvron et al. 2023; reference: `modeling_llama` of Hugging Face transformers): pre-norm
//! blocks of grouped-query attention and a gated feed-forward. Families that differ in biases and
//! head norms only are a [`Variant`] of it.

use inference::Result;

use super::Decoder;
use super::build::{AttentionParts, Builder};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

/// What tells the llama-like architectures apart.
#[derive(Debug, Clone, Copy, Default)]
pub struct Variant {
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the feed-forward block.
    pub mlp_bias: bool,
    /// Norms on query and key heads before rotation.
    pub qk_norm: bool,
}

/// Loads a llama checkpoint.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}

/// Loads the shared decoder as `variant`.
pub(super) fn load_variant(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let mut attention = b.attention(i, &at, parts(variant))?;
        if variant.qk_norm {
            attention.norms = b.head_norms(&at)?;
        }
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(
            &format!("{prefix}.mlp"),
            width,
            activation,
            variant.mlp_bias,
        )?;
        b.pre_norm_block(prefix, attention, FeedForward::Gated(mlp))
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}

/// The attention of a variant.
pub(super) fn parts(variant: Variant) -> AttentionParts {
    AttentionParts {
        qkv_bias: variant.qkv_bias,
        o_bias: variant.o_bias,
        ..AttentionParts::default()
    }
}
