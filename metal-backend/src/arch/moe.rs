//! What the mixtures of experts share: where their matrices are found, the llama decoder with a
//! mixture in place of its feed-forward, and the mixture of the Qwen families.

use inference::Result;

use super::Decoder;
use super::build::{Builder, int};
use super::llama::{Variant, parts};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::{ExpertNames, Weights};
use crate::nn::moe::{SharedExpert, Weighing};
use crate::nn::{Activation, ExpertLinear, Experts, FeedForward, Mixture, Router, Weight};

/// Where a block keeps its experts.
pub struct ExpertsAt<'a> {
    /// Prefix of the stacks, below it `gate_proj`, `up_proj` and `down_proj`.
    pub stacked: String,
    /// Prefix of what is stored one by one, and of fused stacks (`gate_up_proj`, `down_proj`).
    pub single: String,
    /// What a single expert calls its three matrices.
    pub parts: [&'a str; 3],
}

/// The experts of one block.
///
/// # Errors
/// When a tensor is missing or of another shape.
pub fn experts(
    b: &mut Builder<'_>,
    at: &ExpertsAt<'_>,
    count: i32,
    width: i32,
    activation: Gate,
) -> Result<Experts> {
    let hidden = b.dims.hidden;
    let fused = format!("{}.gate_up_proj", at.single);
    if b.weights.contains(&fused) {
        let names = [fused, format!("{}.down_proj", at.single)];
        return fused_experts(b, names, count, width, activation);
    }
    let mut one = |stacked: &str, single: &str, inputs, outputs| {
        let stacked = format!("{}.{stacked}", at.stacked);
        let names = ExpertNames {
            stacked: &stacked,
            single: &|e| format!("{}.{e}.{single}", at.single),
        };
        b.weights.experts(&names, count, inputs, outputs, false)
    };
    let [gate, up, down] = at.parts;
    Ok(Experts {
        gate: Some(one("gate_proj", gate, hidden, width)?),
        up: one("up_proj", up, hidden, width)?,
        down: one("down_proj", down, width, hidden)?,
        activation,
    })
}

/// Experts in two stacks of these names: gate and up in one, `[experts, 2 * width, hidden]`, and
/// down in the other.
///
/// # Errors
/// When a tensor is missing or of another shape.
pub fn fused_experts(
    b: &mut Builder<'_>,
    [gate_up, down]: [String; 2],
    count: i32,
    width: i32,
    activation: Gate,
) -> Result<Experts> {
    let hidden = b.dims.hidden;
    // In GGUF files, stacks may be packed.
    let stacked = |b: &mut Builder<'_>, name: &str, shape: &[i32]| match b.weights.is_gguf() {
        true => b.weights.stack(name, shape),
        false => b.weights.expert_tensor(name, shape).map(Weight::Dense),
    };
    let both = stacked(b, &gate_up, &[count, 2 * width, hidden])?;
    let half = |from: i32| -> Result<ExpertLinear> {
        let rows = both.rows(from, from + width).map_err(engine("weights"))?;
        b.weights.expert_layer(rows, None)
    };
    let (gate, up) = (half(0)?, half(width)?);
    let down = stacked(b, &down, &[count, hidden, width])?;
    Ok(Experts {
        gate: Some(gate),
        up,
        down: b.weights.expert_output(down, None)?,
        activation,
    })
}

/// How many experts there are and how many each token sees.
///
/// # Errors
/// When the file does not say, or says something impossible.
pub fn counts(config: &ModelConfig, per_token: &str) -> Result<(i32, i32)> {
    let name = if config.fields.contains_key("num_local_experts") {
        "num_local_experts"
    } else {
        "num_experts"
    };
    let experts = config.required_uint(name, 1..=limits::EXPERTS)?;
    let k = config.required_uint(per_token, 1..=experts)?;
    Ok((int(name, experts)?, int(per_token, k)?))
}

/// A Qwen block's mixture, or the plain feed-forward of the layers that have none.
///
/// # Errors
/// When a tensor is missing or of another shape.
pub fn qwen_block(
    b: &mut Builder<'_>,
    i: usize,
    prefix: &str,
    shared: bool,
) -> Result<FeedForward> {
    let config = b.config;
    let at = format!("{prefix}.mlp");
    let activation = b.activation(Activation::Silu)?;
    let step = config
        .uint("decoder_sparse_step", 1..=usize::MAX)?
        .unwrap_or(1);
    let plain = config.numbers("mlp_only_layers")?.unwrap_or_default();
    if plain.contains(&(i as f32)) || !(i + 1).is_multiple_of(step) {
        let mlp = b.gated_mlp(&at, b.dims.intermediate, activation, false)?;
        return Ok(FeedForward::Gated(mlp));
    }
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let width = |b: &Builder<'_>, name: &str| {
        let whole = config.required_uint(name, 1..=limits::INTERMEDIATE)?;
        b.part_of(name, whole)
    };
    let expert_width = width(b, "moe_intermediate_size")?;
    let normalized = config.flag("norm_topk_prob")?.unwrap_or(false);
    let hidden = b.dims.hidden;
    let shared = if shared {
        let width = width(b, "shared_expert_intermediate_size")?;
        Some((
            SharedExpert::Gated(b.gated_mlp(
                &format!("{at}.shared_expert"),
                width,
                activation,
                false,
            )?),
            Some(b.linear(&format!("{at}.shared_expert_gate"), hidden, 1, false)?),
        ))
    } else {
        None
    };
    Ok(FeedForward::Mixture(Box::new(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.gate"), hidden, count, false)?,
            per_token,
            weighing: if normalized {
                Weighing::NormalizedShare
            } else {
                Weighing::Share
            },
            choice_bias: None,
        },
        experts: experts(
            b,
            &ExpertsAt {
                stacked: format!("{at}.switch_mlp"),
                single: format!("{at}.experts"),
                parts: ["gate_proj", "up_proj", "down_proj"],
            },
            count,
            expert_width,
            Gate::Plain(activation),
        )?,
        shared,
    })))
}

/// The llama decoder with a feed-forward of the caller's.
///
/// # Errors
/// When a tensor is missing or of another shape.
pub fn load(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
    mlp: &dyn Fn(&mut Builder<'_>, usize, &str) -> Result<FeedForward>,
) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let mut attention = b.attention(i, &at, parts(variant))?;
        if variant.qk_norm {
            attention.norms = b.head_norms(&at)?;
        }
        let mlp = mlp(b, i, prefix)?;
        b.pre_norm_block(prefix, attention, mlp)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}
