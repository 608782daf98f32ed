//! Ling and Ring (inclusionAI 2025; reference: `modeling_bailing_moe` of their checkpoints):
//! softmax or sigmoid routing of experts, expert groups if configured, and fused QKV projections.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{USUAL_PARTS, load as load_mixture, routed_block};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "norm_head")?;
    let variant = Variant {
        qkv_bias: config.attention_bias,
        o_bias: config.flag("use_bias")?.unwrap_or(false),
        qk_norm: config.flag("use_qk_norm")?.unwrap_or(false),
        // GGUF files of the first version have three separate matrices.
        fused: weights.contains("model.layers.0.self_attn.qkv_proj.weight"),
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}
