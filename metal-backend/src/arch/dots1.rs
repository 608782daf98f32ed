//! dots.llm1 (rednote-hilab 2025; reference: `modeling_dots1` of Hugging Face transformers). Query
//! and key heads have norms. The first layers are dense. The others have sigmoid-routed experts
//! with a selection bias.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qk_norm: true,
        ..Variant::configured(config)
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}
