//! GLM-4 of 2024 (GLM Team 2024; reference: `modeling_glm` of Hugging Face transformers). Half of
//! each head rotates, in adjacent pairs. One matrix computes gate and up.

use inference::Result;

use super::Decoder;
use super::llama::{MlpKind, Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.attention_bias,
        traditional: true,
        // GGUF files of ChatGLM have one matrix for queries, keys and values.
        fused: weights.contains("model.layers.0.self_attn.qkv_proj.weight"),
        mlp: MlpKind::Fused,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
