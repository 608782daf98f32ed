//! GLM-4.7 Flash (GLM Team 2026; reference: `modeling_glm4_moe_lite` of Hugging Face transformers):
//! latent attention, and sigmoid-routed experts with a selection bias.

use inference::Result;

use super::Decoder;
use super::latent::{Latent, routed};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let latent = Latent {
        traditional: true,
        eps: None,
        ..Latent::DEEPSEEK
    };
    Ok(Box::new(routed(config, weights, latent)?))
}
