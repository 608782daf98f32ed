//! Qwen3-MoE (Yang et al. 2025; reference: `modeling_qwen3_moe` of Hugging Face transformers):
//! qwen3 with mixtures of experts.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{load as load_mixture, qwen_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qk_norm: true,
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        qwen_block(b, i, prefix, false)
    })
}
