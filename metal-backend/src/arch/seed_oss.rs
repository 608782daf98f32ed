//! Seed-OSS (ByteDance 2025; reference: `modeling_seed_oss` of Hugging Face transformers). It is
//! the llama decoder with a separate option for the bias of the output projection.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        o_bias: config.flag("attention_out_bias")?.unwrap_or(false),
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
