//! GLM-4.5 to 4.7 (GLM Team 2025; reference: `modeling_glm4_moe` of Hugging Face transformers):
//! dense layers, then sigmoid-routed experts with a selection bias. Half of each head is rotated.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.attention_bias,
        qk_norm: config.flag("use_qk_norm")?.unwrap_or(false),
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}
