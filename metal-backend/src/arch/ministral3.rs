//! Ministral 3 (Mistral AI 2025; reference: `modeling_ministral3` of Hugging Face transformers). It
//! is the llama decoder whose queries grow with the logarithm of their position. It is also the
//! text part of Mistral Small 3 and Devstral, whose queries do not grow.

use inference::Result;

use super::Decoder;
use super::build::invalid;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::attention::Growth;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        growth: growth(config)?,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}

/// Returns the growth of queries, from `rope_parameters`.
pub(super) fn growth(config: &ModelConfig) -> Result<Option<Growth>> {
    const BETA: &str = "llama_4_scaling_beta";
    const STEP: &str = "original_max_position_embeddings";
    let field = |name: &str| config.fields.get("rope_parameters")?.get(name);
    let Some(beta) = field(BETA).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let wrong = |name: &str| invalid(format!("rope_parameters.{name} must be a number above 0"));
    let beta = beta.as_f64().ok_or_else(|| wrong(BETA))?;
    let step = field(STEP)
        .and_then(|value| i32::try_from(value.as_i64()?).ok())
        .filter(|step| *step > 0)
        .ok_or_else(|| wrong(STEP))?;
    Ok(Some(Growth {
        beta: beta as f32,
        step,
        shift: 0,
    }))
}
