//! Mellum 2 (JetBrains 2026; reference: `modeling_mellum` of Hugging Face transformers): the mixtures of
//! Qwen3-MoE, with windows and a rotation of their own in some layers.

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
