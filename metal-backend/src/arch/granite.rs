//! Granite (IBM 2024; reference: `modeling_granite` of Hugging Face transformers). It is the llama
//! decoder with factors on the embedding, the scores, the residual branches, and the logits.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::llama::{Variant, variant_stack};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let stack = variant_stack(config, weights, variant(config)?)?;
    Ok(Box::new(with_factors(config, weights, stack)?))
}

/// Returns the llama variant with the factors that apply inside blocks.
pub(super) fn variant(config: &ModelConfig) -> Result<Variant> {
    let residual = config.number("residual_multiplier")?;
    Ok(Variant {
        score_scale: Some(config.number("attention_multiplier")?.unwrap_or(1.0)),
        residual: residual.filter(|&factor| factor != 1.0),
        ..Variant::configured(config)
    })
}

/// Sets the factors on the embedding and the logits.
pub(super) fn with_factors(
    config: &ModelConfig,
    weights: &mut Weights,
    stack: Stack,
) -> Result<Stack> {
    let b = Builder::new(config, weights)?;
    let mut stack = stack;
    stack.embedding_scale = b.factor("embedding_multiplier")?;
    let divisor = config.number("logits_scaling")?.unwrap_or(1.0);
    if divisor != 1.0 {
        stack.head.scale = Some(b.scalar(1.0 / divisor)?);
    }
    Ok(stack)
}
