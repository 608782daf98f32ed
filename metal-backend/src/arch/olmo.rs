//! OLMo (Groeneveld et al. 2024, arXiv:2402.00838; reference: `modeling_olmo` of Hugging Face
//! transformers): llama with clamped queries, keys and values. Its layer norms have no weights.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::gemma2::cap;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        norms: NormKind::PlainLayer,
        clip: cap(config, "clip_qkv")?,
        mlp_bias: false,
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
