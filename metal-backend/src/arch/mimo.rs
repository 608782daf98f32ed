//! `MiMo` (Xiaomi 2025; reference: `modeling_mimo` of its checkpoints). It is the llama decoder
//! with biases on queries, keys and values. The layers for multi-token prediction are not used.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.flag("attention_bias")?.unwrap_or(true),
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
