//! Lille (Nikity 2025; reference: mlx-lm's `lille-130m`): the llama decoder with one matrix for
//! queries, keys and values, and rotation of adjacent elements.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        traditional: true,
        fused: true,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
