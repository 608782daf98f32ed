//! EXAONE 3 (LG AI Research 2024; reference: `modeling_exaone` of its checkpoints). It is the llama
//! decoder with other tensor names, which the descriptor translates.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_variant(config, weights, Variant::configured(config))
}
