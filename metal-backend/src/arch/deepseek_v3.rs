//! `DeepSeek` V3 (DeepSeek-AI 2024; reference: `modeling_deepseek_v3` of Hugging Face
//! transformers): latent attention, and sigmoid routing with a selection bias that first selects
//! groups of experts.

use inference::Result;

use super::Decoder;
use super::latent::{Latent, routed};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    Ok(Box::new(routed(config, weights, Latent::DEEPSEEK)?))
}
