//! `StableLM` (Stability AI 2023; reference: `modeling_stablelm` of Hugging Face transformers). It
//! has layer norms, and a quarter of each head is rotated. Attention and feed-forward part may read
//! the same norm.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::{Parallel, Variant, load_variant};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "qk_layernorm")?;
    let parallel = config.flag("use_parallel_residual")?.unwrap_or(false);
    let variant = Variant {
        qkv_bias: config.flag("use_qkv_bias")?.unwrap_or(false),
        norms: NormKind::Layer { bias: true },
        parallel: parallel.then_some(Parallel::OneNorm),
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
