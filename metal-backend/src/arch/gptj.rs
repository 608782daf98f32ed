//! GPT-J (Wang and Komatsuzaki 2021; reference: `modeling_gptj` of Hugging Face transformers).
//! Attention and a feed-forward part of two matrices read the same layer norm, and their outputs
//! are summed. A part of each head is rotated in adjacent pairs.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::{MlpKind, Parallel, Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    ignore_masks(config, weights);
    let variant = Variant {
        mlp_bias: true,
        head_bias: true,
        norms: NormKind::Layer { bias: true },
        traditional: true,
        mlp: MlpKind::Plain,
        parallel: Some(Parallel::OneNorm),
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}

/// Ignores the causal masks in old checkpoints.
pub(super) fn ignore_masks(config: &ModelConfig, weights: &mut Weights) {
    for layer in 0..config.num_hidden_layers {
        for (part, mask) in [
            ("self_attn", "bias"),
            ("self_attn", "masked_bias"),
            ("attn", "bias"),
            ("attn", "masked_bias"),
        ] {
            weights.ignore(&format!("model.layers.{layer}.{part}.{mask}"));
        }
    }
}
