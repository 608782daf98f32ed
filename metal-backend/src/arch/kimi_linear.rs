//! Kimi Linear (Kimi Team 2025, arXiv:2510.26692; reference: `modeling_kimi_linear` of Hugging Face
//! transformers): Kimi Delta Attention in most layers, latent attention without positions in the
//! others, and `DeepSeek`'s mixtures of experts.

use inference::Result;
use mlx_rs_core::{Array, Dtype};

use super::Decoder;
use super::build::{Builder, MAX_CONV, int};
use super::latent::{self, Latent};
use super::moe::routed_block;
use super::stack::Stack;
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::Mixer;
use crate::nn::delta_attention::{DeltaAttention, DeltaAttentionShape};

/// The tensor names of an expert's gate, up and down.
const PARTS: [&str; 3] = ["w1", "w3", "w2"];

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let shape = shape(config)?;
    let settings = Latent {
        traditional: false,
        eps: Some(1e-6),
        unrotated: true,
        ..Latent::DEEPSEEK
    };
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let mixer: Box<dyn Mixer> = if b.config.is_recurrent(i) {
            Box::new(delta_attention(b, &at, shape)?)
        } else {
            Box::new(latent::attention(b, i, &at, settings)?)
        };
        let mlp = routed_block(b, i, prefix, PARTS)?;
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

/// Returns the sizes of Kimi Delta Attention.
fn shape(config: &ModelConfig) -> Result<DeltaAttentionShape> {
    let size = |name: &str, range| int(name, config.required_uint(name, range)?);
    Ok(DeltaAttentionShape {
        heads: size("linear_num_heads", 1..=limits::HEADS)?,
        dim: size("linear_head_dim", 1..=limits::HEAD_DIM)?,
        width: size("linear_conv_kernel_dim", 2..=MAX_CONV)?,
    })
}

fn delta_attention(
    b: &mut Builder<'_>,
    at: &str,
    shape: DeltaAttentionShape,
) -> Result<DeltaAttention> {
    let name = |part: &str| format!("{at}.{part}");
    let (hidden, heads, dim, inner) = (b.dims.hidden, shape.heads, shape.dim, shape.inner());
    let fault = engine("weights");
    let mut input = |part: &str| -> Result<_> {
        let linear = b.linear(&name(&format!("{part}_proj")), hidden, inner, false)?;
        let conv = b.causal_conv(&name(&format!("{part}_conv1d")), inner, shape.width)?;
        Ok((linear, conv))
    };
    let inputs = [input("q")?, input("k")?, input("v")?];
    let wide = |a: Array| a.astype(Dtype::Float32).map_err(engine("weights"));
    let stored = [1, 1, heads, 1];
    let rates = if b.weights.contains(&name("rates")) {
        wide(b.weights.tensor(&name("rates"), &stored)?)
    } else {
        // Directories store `log(-rate)` instead of the rates.
        wide(b.weights.tensor(&name("A_log"), &stored)?)?
            .exp()
            .and_then(|rates| rates.negative())
            .map_err(&fault)
    };
    let rates = rates?
        .reshape(&[heads, 1])
        .and_then(|rates| rates.eval().map(|()| rates))
        .map_err(fault)?;
    let dt_bias = b.flat_vector(&name("dt_bias"), inner)?;
    Ok(DeltaAttention {
        inputs,
        forget: [
            b.linear(&name("f_a_proj"), hidden, dim, false)?,
            b.linear(&name("f_b_proj"), dim, inner, false)?,
        ],
        strength: b.linear(&name("b_proj"), hidden, heads, false)?,
        gate: [
            b.linear(&name("g_a_proj"), hidden, dim, false)?,
            b.linear(&name("g_b_proj"), dim, inner, false)?,
        ],
        rates,
        dt_bias: wide(dt_bias)?,
        norm: b.norm(&name("o_norm"), dim)?,
        o_proj: b.linear(&name("o_proj"), inner, hidden, false)?,
        shape,
        layout: shape.layout(),
    })
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
