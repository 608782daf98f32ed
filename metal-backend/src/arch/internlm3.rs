//! InternLM 3 (reference: `internlm3` of Hugging Face transformers): llama. The base of the
//! rotation grows with the length of the sequence.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    if config.attention_bias != config.mlp_bias {
        // The reference also rejects this, because its result would differ from the original code.
        return Err(Error::new(
            ErrorKind::Unsupported,
            "qkv_bias and bias differ; only equal values are supported",
        ));
    }
    load_variant(config, weights, Variant::configured(config))
}
