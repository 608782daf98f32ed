//! Phi 1 to 2 (Microsoft 2023; reference: `modeling_phi` of Hugging Face transformers). Attention
//! and a feed-forward part of two matrices read the same layer norm, and their outputs are summed.
//! All layers have biases, including the head.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::{MlpKind, Parallel, Variant, load_variant};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "qk_layernorm")?;
    let variant = Variant {
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        head_bias: true,
        // Old GGUF files have one matrix for queries, keys and values.
        fused: weights.contains("model.layers.0.self_attn.qkv_proj.weight"),
        norms: NormKind::Layer { bias: true },
        mlp: MlpKind::Plain,
        parallel: Some(Parallel::OneNorm),
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
