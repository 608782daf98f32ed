//! Mellum 2 (JetBrains 2026; reference: `modeling_mellum` of Hugging Face transformers): Qwen3-MoE,
//! where some layers have a sliding window and a separate rotary embedding.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{load as load_mixture, qwen_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qk_norm: true,
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        qwen_block(b, i, prefix, false)
    })
}
