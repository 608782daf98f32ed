//! `MiniCPM` (Hu et al. 2024; reference: `modeling_minicpm` of its checkpoints). It is the llama decoder
//! with factors on the embedding, the residual branches and the logits.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::llama::{Variant, variant_stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let layers = config.num_hidden_layers as f32;
    let depth = config.number("scale_depth")?;
    let variant = Variant {
        residual: depth.map(|depth| depth / layers.sqrt()),
        ..Variant::configured(config)
    };
    let mut stack = variant_stack(config, weights, variant)?;
    let base = config.number("dim_model_base")?.filter(|base| *base > 0.0);
    let b = Builder::new(config, weights)?;
    stack.embedding_scale = b.factor("scale_emb")?;
    if let Some(base) = base {
        stack.head.scale = Some(b.scalar(base / config.hidden_size as f32)?);
    }
    Ok(Box::new(stack))
}
