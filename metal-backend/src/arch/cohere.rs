//! Cohere's Command R (Cohere 2024; reference: `modeling_cohere` of Hugging Face transformers).
//! Attention and feed-forward read the same norm, and their outputs are summed. Rotary embedding
//! pairs adjacent elements, and logits are scaled.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::llama::{Parallel, Variant, variant_stack};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "use_qk_norm")?;
    let bias = config.flag("layer_norm_bias")?.unwrap_or(false);
    let variant = Variant {
        norms: NormKind::Layer { bias },
        traditional: true,
        parallel: Some(Parallel::OneNorm),
        mlp_bias: false,
        ..Variant::configured(config)
    };
    let mut stack = variant_stack(config, weights, variant)?;
    stack.head.scale = Builder::new(config, weights)?.factor("logit_scale")?;
    Ok(Box::new(stack))
}
