//! Mistral 4 (Mistral AI 2026; reference: `modeling_mistral4` of Hugging Face transformers): latent
//! attention whose queries grow with the logarithm of their position, and experts chosen by a
//! softmax.

use inference::Result;

use super::Decoder;
use super::latent::{Latent, routed};
use super::ministral3::growth;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let latent = Latent {
        traditional: config.flag("rope_interleave")?.unwrap_or(true),
        growth: growth(config)?,
        ..Latent::DEEPSEEK
    };
    Ok(Box::new(routed(config, weights, latent)?))
}
