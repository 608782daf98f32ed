//! SmolLM3 (Bakouch et al. 2025; reference: `modeling_smollm3` of Hugging Face transformers). It is
//! the llama decoder in which some layers have no rotary embedding: every fourth one by default.

use inference::Result;

use super::Decoder;
use super::build::{Builder, invalid};
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let rotates = rotating_layers(config)?;
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            no_rope: !rotates[i],
            ..AttentionParts::default()
        };
        let attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
        let (width, bias) = (b.dims.intermediate, b.config.mlp_bias);
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, activation, bias)?;
        b.pre_norm_block(prefix, attention, FeedForward::Gated(mlp))
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

/// Returns whether each layer has a rotary embedding. This is determined by the list
/// `no_rope_layers`, where 1 means that the layer has one, or else by `no_rope_layer_interval`.
pub(super) fn rotating_layers(config: &ModelConfig) -> Result<Vec<bool>> {
    let layers = config.num_hidden_layers;
    match config.numbers("no_rope_layers")? {
        Some(listed) if listed.len() == layers => Ok(listed.iter().map(|&n| n != 0.0).collect()),
        Some(listed) => Err(invalid(format!(
            "no_rope_layers lists {} layers; num_hidden_layers is {layers}",
            listed.len()
        ))),
        None => {
            let every = config
                .uint("no_rope_layer_interval", 1..=usize::MAX)?
                .unwrap_or(4);
            Ok((0..layers)
                .map(|i| !(i + 1).is_multiple_of(every))
                .collect())
        }
    }
}
