//! ERNIE 4.5 with mixtures of experts (Baidu 2025; reference: `modeling_ernie4_5_moe` of Hugging
//! Face transformers). Routing is a softmax with a selection bias. The weights of the selected
//! experts are renormalized.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let last = config.num_hidden_layers - 1;
    let ends = config.uint("moe_layer_end_index", 0..=usize::MAX)?;
    let every = config.uint("moe_layer_interval", 1..=usize::MAX)?;
    if ends.is_some_and(|end| end < last) || every.is_some_and(|every| every != 1) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "moe_layer_interval and moe_layer_end_index leave dense layers after those with \
             experts, which is not supported",
        ));
    }
    let bias = config.flag("use_bias")?.unwrap_or(false);
    let variant = Variant {
        qkv_bias: bias,
        o_bias: bias,
        traditional: true,
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}
