//! Mistral (Jiang et al. 2023; reference: `modeling_mistral` of Hugging Face transformers). It is
//! the llama decoder with a sliding window where the checkpoint configures one.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_variant(config, weights, Variant::default())
}
