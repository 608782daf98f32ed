//! Helium (Kyutai 2025; reference: `modeling_helium` of Hugging Face transformers). It is the llama
//! decoder with adjacent rotary pairs.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        traditional: true,
        o_bias: false,
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
