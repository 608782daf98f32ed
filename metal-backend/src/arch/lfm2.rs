//! LFM2 (Liquid AI 2025, arXiv:2511.23404; reference: `modeling_lfm2` of Hugging Face
//! transformers). Some layers are short convolutions, which cache a state. The others are
//! grouped-query attention, which caches keys and values.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, MAX_CONV, int};
use super::build_attention::AttentionParts;
use super::stack::{Block, Stack};
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, Attention, FeedForward, HeadNorms, Mixer, ShortConv};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_with(config, weights, &|b, _, at| {
        let width = b.dims.intermediate;
        feed_forward(b, at, width)
    })
}

/// Builds the decoder. `feed_forward` receives a block's index and prefix, and builds the
/// feed-forward part.
pub(super) fn load_with(
    config: &ModelConfig,
    weights: &mut Weights,
    mlp: &dyn Fn(&mut Builder<'_>, usize, &str) -> Result<FeedForward>,
) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let mixer: Box<dyn Mixer> = if b.config.is_recurrent(i) {
            Box::new(short_conv(b, &format!("{prefix}.conv"))?)
        } else {
            Box::new(attention(b, i, &format!("{prefix}.self_attn"))?)
        };
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&format!("{prefix}.operator_norm"))?),
            mixer,
            mixer_out: None,
            mlp_in: Some(b.hidden_norm(&format!("{prefix}.ffn_norm"))?),
            mlp: mlp(b, i, &format!("{prefix}.feed_forward"))?,
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.embedding_norm")?,
        head: b.head(Some(true))?,
    }))
}

/// Builds the gated feed-forward block. Its tensors have the names of transformers, or those that
/// mlx-lm uses for models with experts.
pub(super) fn feed_forward(b: &mut Builder<'_>, at: &str, width: i32) -> Result<FeedForward> {
    let mlp = if b.weights.contains(&format!("{at}.gate_proj.weight")) {
        b.gated_mlp(at, width, Activation::Silu, false)?
    } else {
        b.gated_mlp_of((at, ["w1", "w3", "w2"]), width, Activation::Silu, false)?
    };
    Ok(FeedForward::Gated(mlp))
}

fn attention(b: &mut Builder<'_>, i: usize, at: &str) -> Result<Attention> {
    let parts = AttentionParts {
        out_proj: true,
        ..AttentionParts::default()
    };
    let mut attention = b.attention(i, at, parts)?;
    let dim = b.dims.head_dim;
    attention.norms = HeadNorms {
        q: Some(b.norm(&format!("{at}.q_layernorm"), dim)?),
        k: Some(b.norm(&format!("{at}.k_layernorm"), dim)?),
        ..HeadNorms::default()
    };
    Ok(attention)
}

fn short_conv(b: &mut Builder<'_>, at: &str) -> Result<ShortConv> {
    if b.config.flag("conv_bias")?.unwrap_or(false) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "conv_bias is true; only models without these biases are supported",
        ));
    }
    let (hidden, width) = (b.dims.hidden, conv_width(b.config)?);
    Ok(ShortConv {
        in_proj: b.linear(&format!("{at}.in_proj"), hidden, 3 * hidden, false)?,
        conv: b.causal_conv(&format!("{at}.conv"), hidden, width)?,
        out_proj: b.linear(&format!("{at}.out_proj"), hidden, hidden, false)?,
        layout: ShortConv::state_layout(hidden, width),
    })
}

fn conv_width(config: &ModelConfig) -> Result<i32> {
    int(
        "conv_L_cache",
        config.required_uint("conv_L_cache", 2..=MAX_CONV)?,
    )
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let hidden = int("hidden_size", config.hidden_size)?;
    let layout = ShortConv::state_layout(hidden, conv_width(config)?);
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
