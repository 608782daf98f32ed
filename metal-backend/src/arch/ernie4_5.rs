//! ERNIE 4.5 (Baidu 2025; reference: `modeling_ernie4_5` of Hugging Face transformers). It is the
//! llama decoder with adjacent rotary pairs, and with biases everywhere or nowhere.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let bias = config.flag("use_bias")?.unwrap_or(false);
    let variant = Variant {
        qkv_bias: bias,
        o_bias: bias,
        mlp_bias: bias,
        traditional: true,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
