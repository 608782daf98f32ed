//! Granite 3 with mixtures of experts (IBM 2024; reference: `modeling_granitemoe` of Hugging Face
//! transformers), weighted by a softmax over the chosen experts.

use inference::Result;

use super::Decoder;
use super::llama::stack_of;
use super::{granite, granitemoehybrid};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::Activation;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = granite::variant(config)?;
    let stack = stack_of(config, weights, variant, &|b, _, prefix| {
        let activation = b.activation(Activation::Silu)?;
        let width = b.dims.intermediate;
        granitemoehybrid::mixture(b, prefix, width, activation, None)
    })?;
    Ok(Box::new(granite::with_factors(config, weights, stack)?))
}
