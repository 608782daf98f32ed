//! `MiniCPM` (Hu et al. 2024; reference: `modeling_minicpm` of its checkpoints). It is the llama
//! decoder with factors on the embedding, the residual branches and the logits.

use inference::Result;
use mlx_rs_core::Array;

use super::Decoder;
use super::build::Builder;
use super::llama::{Variant, variant_stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        residual: residual(config)?,
        ..Variant::configured(config)
    };
    let mut stack = variant_stack(config, weights, variant)?;
    let b = Builder::new(config, weights)?;
    stack.embedding_scale = b.factor("scale_emb")?;
    stack.head.scale = logit_scale(&b)?;
    Ok(Box::new(stack))
}

/// Returns the factor on the residual branches.
pub(super) fn residual(config: &ModelConfig) -> Result<Option<f32>> {
    let layers = config.num_hidden_layers as f32;
    let depth = config.number("scale_depth")?;
    Ok(depth.map(|depth| depth / layers.sqrt()))
}

/// Returns the factor on the logits. `None` if the configuration does not contain the width for
/// which the logits were tuned.
pub(super) fn logit_scale(b: &Builder<'_>) -> Result<Option<Array>> {
    let base = b
        .config
        .number("dim_model_base")?
        .filter(|base| *base > 0.0);
    base.map(|base| b.scalar(base / b.dims.hidden as f32))
        .transpose()
}
