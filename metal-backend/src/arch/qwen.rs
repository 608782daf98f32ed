//! Qwen 1 (Bai et al. 2023, arXiv:2309.16609; reference: mlx-lm's `qwen`): the llama decoder with
//! one matrix for queries, keys and values, which has biases.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let biases = !config.flag("no_bias")?.unwrap_or(true);
    let variant = Variant {
        qkv_bias: true,
        o_bias: biases,
        mlp_bias: biases,
        head_bias: biases,
        fused: true,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
