//! The text part of Qwen3.5 with mixtures of experts (Qwen team 2026; reference:
//! `modeling_qwen3_5_moe` of Hugging Face transformers): Qwen3-Next with separate projections.

use inference::Result;

use super::{Decoder, qwen3_next};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    qwen3_next::load(config, weights)
}
