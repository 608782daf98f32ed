//! The text part of Qwen3.5 (Qwen team 2026; reference: `modeling_qwen3_5` of Hugging Face
//! transformers): a dense Qwen3-Next with separate projections.

use inference::Result;

use super::{Decoder, qwen3_next};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    qwen3_next::load(config, weights)
}
