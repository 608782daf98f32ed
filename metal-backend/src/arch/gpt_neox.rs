//! GPT-NeoX (Black et al. 2022) and Pythia; reference: `modeling_gpt_neox` of Hugging Face
//! transformers. Attention and a feed-forward part of two matrices read the same input through
//! separate norms, and their outputs are summed. Queries, keys and values come from one matrix,
//! interleaved by head.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::{MlpKind, Parallel, Variant, load_variant};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let parallel = config.flag("use_parallel_residual")?.unwrap_or(true);
    let bias = config.flag("attention_bias")?.unwrap_or(true);
    for layer in 0..config.num_hidden_layers {
        // Old checkpoints also store masks and frequencies. These tensors are ignored, because the
        // engine computes them.
        for buffer in ["bias", "masked_bias", "rotary_emb.inv_freq"] {
            weights.ignore(&format!("model.layers.{layer}.attention.{buffer}"));
        }
    }
    let variant = Variant {
        qkv_bias: bias,
        o_bias: bias,
        mlp_bias: true,
        norms: NormKind::Layer { bias: true },
        grouped: !weights.is_gguf(),
        fused: true,
        mlp: MlpKind::Plain,
        parallel: parallel.then_some(Parallel::TwoNorms),
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}
