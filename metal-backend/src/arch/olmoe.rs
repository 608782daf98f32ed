//! `OLMoE` (Muennighoff et al. 2024; reference: `modeling_olmoe` of Hugging Face transformers):
//! mixtures of experts, and norms across all query heads and all key heads.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{load as load_mixture, share_block};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "clip_qkv")?;
    let variant = Variant {
        wide_qk_norm: true,
        ..Variant::configured(config)
    };
    load_mixture(config, weights, variant, &|b, _, prefix| {
        let width = b.dims.intermediate;
        share_block(b, prefix, width)
    })
}
