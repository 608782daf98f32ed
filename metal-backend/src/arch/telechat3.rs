//! `TeleChat` 3 (China Telecom 2025; reference: `modeling_telechat3` of its checkpoints). It is the
//! llama decoder.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_variant(config, weights, Variant::configured(config))
}
