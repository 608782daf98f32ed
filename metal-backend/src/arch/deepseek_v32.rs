//! `DeepSeek` V3.2 (DeepSeek-AI 2025; reference: `modeling_deepseek_v32` of Hugging Face
//! transformers): `DeepSeek` V3 with an indexer in each layer, which selects the positions to which
//! a query attends.

use inference::Result;

use super::Decoder;
use super::latent::{Latent, indexed};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let stack = indexed(config, weights, Latent::DEEPSEEK, false)?;
    Ok(Box::new(stack))
}
