//! gpt-oss (OpenAI 2025; reference: `modeling_gpt_oss` of Hugging Face transformers). It has
//! attention sinks, a window in every other layer, and experts with biases and a clamped gate.
//! Experts are stored dense, or as MXFP4 in OpenAI's or MLX's layout.

use inference::Result;
use mlx_rs_core::{Array, QuantMode, Quantized};

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::moe::{counts, with_expert_slot};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::{ExpertNames, Weights};
use crate::nn::expert_router::Weighing;
use crate::nn::{Experts, FeedForward, Mixture, Router, Weight};

/// The slope of the gate's sigmoid.
const ALPHA: f32 = 1.702;
/// The default clamp of gate and up outputs.
const LIMIT: f32 = 7.0;
/// Number of weights that share a scale in MXFP4.
const BLOCK: i32 = 32;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let limit = config.number("swiglu_limit")?.unwrap_or(LIMIT);
    let mut b = Builder::new(config, weights)?;
    let bias = config.flag("attention_bias")?.unwrap_or(true);
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias: bias,
            o_bias: bias,
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.sinks = Some(b.weights.vector(&format!("{at}.sinks"), b.dims.n_heads)?);
        let hidden = b.dims.hidden;
        let mixture = Mixture {
            router: Router {
                linear: b.linear(&format!("{prefix}.mlp.router"), hidden, count, true)?,
                per_token,
                weighing: Weighing::SoftmaxOfChosen,
                choice_bias: None,
                groups: None,
                logit_cap: None,
            },
            experts: experts(b, &format!("{prefix}.mlp.experts"), count, limit)?,
            shared: None,
            scale: None,
            weighs_inputs: false,
        };
        b.pre_norm_block(prefix, attention, FeedForward::Mixture(Box::new(mixture)))
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

fn experts(b: &mut Builder<'_>, at: &str, count: i32, limit: f32) -> Result<Experts> {
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let activation = Gate::Clamped {
        alpha: ALPHA,
        limit,
    };
    let fused = format!("{at}.gate_up_proj");
    let packed = b.weights.contains(&format!("{fused}_blocks"));
    if !packed && !b.weights.contains(&fused) {
        let mut one = |part: &str, inputs, outputs| {
            let stacked = format!("{at}.{part}");
            let names = ExpertNames {
                stacked: &stacked,
                single: &|e| format!("{at}.{e}.{part}"),
            };
            b.weights.experts(&names, count, inputs, outputs, true)
        };
        return Ok(Experts {
            gate: Some(one("gate_proj", hidden, width)?),
            up: one("up_proj", hidden, width)?,
            down: one("down_proj", width, hidden)?,
            activation,
        });
    }
    let down = format!("{at}.down_proj");
    let (both, down_weight) = if packed {
        (
            mxfp4(b, &fused, count, 2 * width, hidden)?,
            mxfp4(b, &down, count, hidden, width)?,
        )
    } else {
        (
            transposed(b, &fused, count, 2 * width, hidden)?,
            transposed(b, &down, count, hidden, width)?,
        )
    };
    // Rows of gate and up alternate in the matrix and in the bias, so both are split.
    let both_bias = b
        .weights
        .tensor(&format!("{fused}_bias"), &[count, 2 * width])?
        .expand_dims(-1)
        .map_err(engine("weights"))?;
    let dtype = b.weights.dtype();
    let half = |first: i32| -> mlx_rs_core::Result<(Weight, Array)> {
        let weight = match (both.quantized()?, &both) {
            (None, Weight::Dense(w)) => Weight::Dense(every_other_row(w, first)?),
            (None, _) => Weight::Dense(every_other_row(&both.dense(dtype)?, first)?),
            (Some(q), _) => Weight::Quantized(Quantized {
                weight: every_other_row(&q.weight, first)?,
                scales: every_other_row(&q.scales, first)?,
                ..q
            }),
        };
        let bias = every_other_row(&both_bias, first)?.squeeze_axis(-1)?;
        Ok((weight, bias))
    };
    let halves = [half(0), half(1)].map(|half| half.map_err(engine("weights")));
    let [(gate, gate_bias), (up, up_bias)] = {
        let [gate, up] = halves;
        [gate?, up?]
    };
    let down_bias = b
        .weights
        .tensor(&format!("{down}_bias"), &[count, hidden])?;
    let gate = b.weights.expert_layer(gate, Some(gate_bias))?;
    let up = b.weights.expert_layer(up, Some(up_bias))?;
    let down = b.weights.expert_output(down_weight, Some(down_bias))?;
    // An adapter of experts in OpenAI's packing could not be merged into the checkpoint.
    let mut with_slot = |part: &str, layer| match packed {
        true => Ok(layer),
        false => with_expert_slot(b, &format!("{at}.{part}"), layer),
    };
    Ok(Experts {
        gate: Some(with_slot("gate_proj", gate)?),
        up: with_slot("up_proj", up)?,
        down: with_slot("down_proj", down)?,
        activation,
    })
}

/// Loads dense experts stored as `[experts, in, out]`. Returns them as `[experts, out, in]`.
fn transposed(
    b: &mut Builder<'_>,
    name: &str,
    count: i32,
    outputs: i32,
    inputs: i32,
) -> Result<Weight> {
    b.weights
        .expert_tensor(name, &[count, inputs, outputs])?
        .swap_axes(-1, -2)
        .map(Weight::Dense)
        .map_err(engine("weights"))
}

/// Loads experts in OpenAI's packing of MXFP4. Each block of 32 weights has 16 bytes and a separate
/// scale byte.
fn mxfp4(b: &mut Builder<'_>, name: &str, count: i32, outputs: i32, inputs: i32) -> Result<Weight> {
    let groups = inputs / BLOCK;
    let blocks = [count, outputs, groups, BLOCK / 2];
    let words = b.weights.words(&format!("{name}_blocks"), &blocks)?;
    let weight = words
        .reshape(&[count, outputs, groups * BLOCK / 8])
        .map_err(engine("weights"))?;
    let scales = b
        .weights
        .byte_tensor(&format!("{name}_scales"), &[count, outputs, groups])?;
    Ok(Weight::Quantized(Quantized {
        weight,
        scales,
        biases: None,
        group_size: BLOCK,
        bits: 4,
        mode: QuantMode::Mxfp4,
    }))
}

/// Returns a copy of the rows `first`, `first + 2`, .. of `[experts, rows, cols]`.
fn every_other_row(a: &Array, first: i32) -> mlx_rs_core::Result<Array> {
    let shape = a.shape().to_vec();
    let rows = a.slice(&[0, first, 0], &shape, &[1, 2, 1])?.contiguous()?;
    rows.eval()?;
    Ok(rows)
}
