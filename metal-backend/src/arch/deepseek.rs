//! `DeepSeek` `MoE` (DeepSeek-AI 2024; reference: `modeling_deepseek` of its checkpoints): the
//! llama decoder with softmax-routed experts and shared experts.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_mixture(
        config,
        weights,
        Variant::configured(config),
        &|b, i, prefix| routed_block(b, i, prefix, USUAL_PARTS),
    )
}
