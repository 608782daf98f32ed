//! Qwen2 (Yang et al. 2024; reference: `modeling_qwen2` of Hugging Face transformers). It is the
//! llama decoder with biases on the query, key and value projections.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_variant(
        config,
        weights,
        Variant {
            qkv_bias: true,
            ..Variant::default()
        },
    )
}
