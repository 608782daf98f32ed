//! Hunyuan with mixtures of experts (Tencent 2025; reference: `modeling_hunyuan_v1_moe` of Hugging
//! Face transformers). It is the dense Hunyuan with routed experts and a shared expert.
//! Configurations in which layers share keys (Hunyuan-Large) are not supported.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "use_cla")?;
    let variant = Variant {
        qk_norm: config.flag("use_qk_norm")?.unwrap_or(true),
        norm_after_rotation: true,
        mlp_bias: false,
        ..Variant::configured(config)
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}
