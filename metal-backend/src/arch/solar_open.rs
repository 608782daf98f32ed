//! Solar Open (Upstage 2025; reference: `modeling_solar_open` of Hugging Face transformers):
//! sigmoid-routed experts with a selection bias.

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
