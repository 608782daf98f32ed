//! `MiniMax` M2 (`MiniMax` 2025; reference: `modeling_minimax_m2` of Hugging Face transformers):
//! sigmoid-routed experts with a selection bias, and norms across all query heads and all key
//! heads.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{load as load_mixture, routed_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        wide_qk_norm: config.flag("use_qk_norm")?.unwrap_or(true),
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, ["w1", "w3", "w2"])
    })
}
