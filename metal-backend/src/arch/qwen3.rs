//! Qwen3 (Yang et al. 2025; reference: `modeling_qwen3` of Hugging Face transformers). It is the
//! llama decoder with norms on query and key heads, and biases only where configured.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qk_norm: true,
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
