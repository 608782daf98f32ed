//! Qwen2-MoE (Yang et al. 2024; reference: `modeling_qwen2_moe` of Hugging Face transformers). It
//! is qwen2 with mixtures of routed experts and a shared expert.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{load as load_mixture, qwen_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.flag("qkv_bias")?.unwrap_or(true),
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        qwen_block(b, i, prefix, true)
    })
}
