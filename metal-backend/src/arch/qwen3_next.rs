//! Qwen3-Next (Qwen team 2025; reference: `modeling_qwen3_next` of Hugging Face transformers).
//! Three of four layers have a gated delta net; the fourth has gated attention. The feed-forward
//! parts are mixtures of experts. Qwen3.5 has the same layers, but separate projections.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Dtype;

use super::Decoder;
use super::build::{Builder, MAX_CONV, NormKind, int, invalid};
use super::build_attention::AttentionParts;
use super::mamba2::rates;
use super::moe::qwen_block;
use super::stack::Stack;
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::gated_delta::{Apart, GatedDelta, GatedDeltaShape, Grouped, Halved, Projections};
use crate::nn::{Activation, FeedForward, GatedAttention, Mixer, Norm};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let shape = shape(config)?;
    if config.attention_bias {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "attention_bias is true; only models without these biases are supported",
        ));
    }
    let kind = norms(config, weights);
    let mut b = Builder::new(config, weights)?.with_norms(kind);
    let blocks = b.blocks(|b, i, prefix| {
        let mixer: Box<dyn Mixer> = if b.config.is_recurrent(i) {
            Box::new(gated_delta(b, &format!("{prefix}.linear_attn"), shape)?)
        } else {
            Box::new(attention(b, i, &format!("{prefix}.self_attn"))?)
        };
        let mlp = if b.config.num_experts == 0 {
            let width = b.dims.intermediate;
            let activation = b.activation(Activation::Silu)?;
            let at = format!("{prefix}.mlp");
            FeedForward::Gated(b.gated_mlp(&at, width, activation, false)?)
        } else {
            qwen_block(b, i, prefix, true)?
        };
        b.pre_norm_block(prefix, mixer, mlp)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(Some(false))?,
    }))
}

/// Returns the kind of the norms. They add 1 to the stored weights, unless a conversion has already
/// added the 1. A conversion by mlx-lm adds the 1 and also transposes the convolutions, so the
/// shape of a convolution identifies its checkpoints.
fn norms(config: &ModelConfig, weights: &Weights) -> NormKind {
    let first = (0..config.num_hidden_layers).find(|&layer| config.is_recurrent(layer));
    let conv = |layer: usize| {
        let name = format!("model.layers.{layer}.linear_attn.conv1d.weight");
        weights.shape(&name).map(<[usize]>::to_vec)
    };
    match first.and_then(conv).as_deref() {
        // Conversion to GGUF also adds the 1 to the weights.
        _ if weights.is_gguf() => NormKind::Rms,
        Some([_, _, 1]) => NormKind::Rms,
        _ => NormKind::RmsPlusOne,
    }
}

fn attention(b: &mut Builder<'_>, i: usize, at: &str) -> Result<GatedAttention> {
    let parts = AttentionParts {
        gated: true,
        ..AttentionParts::default()
    };
    let mut attention = b.attention(i, at, parts)?;
    attention.norms = b.head_norms(at)?;
    Ok(GatedAttention {
        attention,
        gate: None,
    })
}

/// Returns the sizes of the gated delta net.
fn shape(config: &ModelConfig) -> Result<GatedDeltaShape> {
    let size = |name: &str, most: usize| int(name, config.required_uint(name, 1..=most)?);
    let width = config.required_uint("linear_conv_kernel_dim", 2..=MAX_CONV)?;
    let shape = GatedDeltaShape {
        k_heads: size("linear_num_key_heads", limits::HEADS)?,
        v_heads: size("linear_num_value_heads", limits::HEADS)?,
        k_dim: size("linear_key_head_dim", limits::HEAD_DIM)?,
        v_dim: size("linear_value_head_dim", limits::HEAD_DIM)?,
        width: int("linear_conv_kernel_dim", width)?,
        tiled: config.flag("linear_value_heads_tiled")?.unwrap_or(false),
    };
    if shape.v_heads % shape.k_heads != 0 {
        return Err(invalid(format!(
            "linear_num_key_heads is {}; it must divide linear_num_value_heads, which is {}",
            shape.k_heads, shape.v_heads
        )));
    }
    Ok(shape)
}

fn gated_delta(b: &mut Builder<'_>, at: &str, shape: GatedDeltaShape) -> Result<GatedDelta> {
    let name = |part: &str| format!("{at}.{part}");
    let (hidden, heads, values) = (b.dims.hidden, shape.v_heads, shape.values());
    let projections = if b.weights.contains(&name("in_proj_qkvz.weight")) {
        let width = shape.channels() + values;
        Projections::Grouped(Box::new(Grouped {
            qkvz: b.linear(&name("in_proj_qkvz"), hidden, width, false)?,
            ba: b.linear(&name("in_proj_ba"), hidden, 2 * heads, false)?,
        }))
    } else if b.weights.contains(&name("in_proj_ba.weight")) {
        Projections::Halved(Box::new(Halved {
            qkv: b.linear(&name("in_proj_qkv"), hidden, shape.channels(), false)?,
            z: b.linear(&name("in_proj_z"), hidden, values, false)?,
            ba: b.linear(&name("in_proj_ba"), hidden, 2 * heads, false)?,
        }))
    } else {
        Projections::Apart(Box::new(Apart {
            qkv: b.linear(&name("in_proj_qkv"), hidden, shape.channels(), false)?,
            z: b.linear(&name("in_proj_z"), hidden, values, false)?,
            b: b.linear(&name("in_proj_b"), hidden, heads, false)?,
            a: b.linear(&name("in_proj_a"), hidden, heads, false)?,
        }))
    };
    let wide = |a: mlx_rs_core::Array| a.astype(Dtype::Float32).map_err(engine("weights"));
    let rates = rates(b, at, heads)?;
    let dt_bias = wide(b.weights.vector(&name("dt_bias"), heads)?)?;
    Ok(GatedDelta {
        projections,
        conv: b.causal_conv(&name("conv1d"), shape.channels(), shape.width)?,
        rates,
        dt_bias,
        norm: plain_norm(b, &name("norm"), shape.v_dim)?,
        out_proj: b.linear(&name("out_proj"), values, hidden, false)?,
        shape,
        layout: shape.layout(),
    })
}

/// Loads the norm of the heads. Unlike the other norms, it never adds 1 to its stored weight.
fn plain_norm(b: &mut Builder<'_>, prefix: &str, dim: i32) -> Result<Norm> {
    let others = std::mem::replace(&mut b.norms, NormKind::Rms);
    let norm = b.norm(prefix, dim);
    b.norms = others;
    norm
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
