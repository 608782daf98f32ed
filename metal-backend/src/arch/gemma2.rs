//! Gemma 2 (Gemma Team 2024; reference: `modeling_gemma2` of Hugging Face transformers). Attention
//! and feed-forward each have a norm on their input and on their output. Scores and logits are
//! capped, and every other layer has a sliding window. This file also builds Gemma 3's text model
//! (Gemma Team 2025; reference: `modeling_gemma3`). Gemma 3 has head norms instead of caps, and
//! five sliding layers per full layer. Its sliding layers have a separate rotary base.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    Ok(Box::new(load_with(config, weights, false)?))
}

/// Builds the decoder, optionally with head norms.
pub(super) fn load_with(
    config: &ModelConfig,
    weights: &mut Weights,
    head_norms: bool,
) -> Result<Stack> {
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::RmsPlusOne);
    let activation = b.activation(Activation::GeluTanh)?;
    let score_dim = config
        .number("query_pre_attn_scalar")?
        .filter(|n| *n > 0.0)
        .unwrap_or(b.dims.head_dim as f32);
    let softcap = cap(config, "attn_logit_softcapping")?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.scale = score_dim.powf(-0.5);
        attention.softcap = softcap;
        if head_norms {
            attention.norms = b.head_norms(&at)?;
        }
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, activation, false)?;
        let mut norm = |part: &str| b.hidden_norm(&format!("{prefix}.{part}")).map(Some);
        Ok(Block {
            mixer_in: norm("input_layernorm")?,
            mixer: attention,
            mixer_out: norm("post_attention_layernorm")?,
            mlp_in: norm("pre_feedforward_layernorm")?,
            mlp: FeedForward::Gated(mlp),
            mlp_out: norm("post_feedforward_layernorm")?,
            residual: None,
            parallel: false,
        })
    })?;
    let scale = (b.dims.hidden as f32).sqrt();
    let mut head = b.head(None)?;
    head.softcap = cap(config, "final_logit_softcapping")?
        .map(|c| b.scalar(c))
        .transpose()?;
    Ok(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: Some(b.scalar(scale)?),
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head,
    })
}

/// Returns a softcap from the configuration; `None` if the field is missing or 0.
pub(super) fn cap(config: &ModelConfig, field: &str) -> Result<Option<f32>> {
    Ok(config.number(field)?.filter(|c| *c > 0.0))
}
