//! Nemotron (NVIDIA 2024; reference: `modeling_nemotron` of Hugging Face transformers). Its layer
//! norms add one to their weight. The feed-forward part is two matrices with a squared `ReLU`. Half
//! of each head rotates.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::{MlpKind, Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        norms: NormKind::LayerPlusOne,
        mlp: MlpKind::Plain,
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
