//! InternLM 2 (Cai et al. 2024, arXiv:2403.17297; reference: `modeling_internlm2` of
//! internlm2-chat-7b): llama with other tensor names. One matrix computes queries, keys and values,
//! interleaved by group. GGUF files have three separate matrices.

use inference::Result;

use super::Decoder;
use super::llama::{Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    for layer in 0..config.num_hidden_layers {
        // Old checkpoints also store the frequencies. The tensor is ignored, because the
        // configuration determines them.
        weights.ignore(&format!("model.layers.{layer}.attention.rope.inv_freq"));
    }
    let variant = Variant {
        grouped: !weights.is_gguf(),
        ..Variant::configured(config)
    };
    load_variant(config, weights, variant)
}
