//! GLM-5 (GLM Team 2026; reference: `modeling_glm_moe_dsa` of Hugging Face transformers): the
//! layers of `DeepSeek` V3.2, whose indexers rotate adjacent elements.

use inference::{Error, ErrorKind, Result};
use serde_json::Value;

use super::Decoder;
use super::latent::{Latent, indexed};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    if shares(config)? {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "some layers use the positions that an earlier layer selected (indexer_types, \
             index_topk_freq, index_topk_pattern); only layers with an indexer of their own are \
             supported",
        ));
    }
    let stack = indexed(config, weights, Latent::DEEPSEEK, true)?;
    Ok(Box::new(stack))
}

/// Returns whether some layers use the indexer of another layer.
fn shares(config: &ModelConfig) -> Result<bool> {
    let listed = config.fields.get("indexer_types").and_then(Value::as_array);
    if let Some(kinds) = listed {
        return Ok(kinds.iter().any(|kind| kind != "full"));
    }
    match config.fields.get("index_topk_pattern") {
        Some(Value::String(letters)) => return Ok(letters.contains(|letter| letter != 'F')),
        Some(Value::Array(kinds)) => return Ok(kinds.iter().any(|kind| kind != "full")),
        _ => {}
    }
    Ok(config.uint("index_topk_freq", 0..=usize::MAX)?.unwrap_or(1) > 1)
}
