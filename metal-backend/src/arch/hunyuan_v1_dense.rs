//! Hunyuan, dense (Tencent 2025; reference: `modeling_hunyuan_v1_dense` of Hugging Face
//! transformers). It is the llama decoder with query and key norms after the rotation.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qk_norm: config.flag("use_qk_norm")?.unwrap_or(true),
        norm_after_rotation: true,
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
