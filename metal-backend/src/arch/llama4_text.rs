//! Llama 4 (Meta 2025; reference: `modeling_llama4` of Hugging Face transformers). Layers with
//! rotation attend to chunks of positions. Layers without rotation attend to all positions, and
//! their queries grow with the position. Some or all layers have experts, whose inputs are
//! multiplied by a sigmoid.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind, int};
use super::build_attention::AttentionParts;
use super::moe::{ExpertsAt, USUAL_PARTS, counts, experts};
use super::smollm3::rotating_layers;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::attention::Growth;
use crate::nn::expert_router::Weighing;
use crate::nn::moe::SharedExpert;
use crate::nn::{Activation, FeedForward, Mixture, Router};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let rotates = rotating_layers(config)?;
    let sparse = sparse_layers(config)?;
    let head_norms = config.flag("use_qk_norm")?.unwrap_or(true);
    let growth = growth(config)?;
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            traditional: true,
            no_rope: !rotates[i],
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.chunk = attention.window.take();
        if !rotates[i] {
            attention.growth = growth;
        } else if head_norms {
            // The reference rotates before these norms. Both orders give the same result: the norms
            // have no weights, and a rotation does not change a vector's length.
            let norms = std::mem::replace(&mut b.norms, NormKind::PlainRms);
            attention.norms = b.head_norms(&at)?;
            b.norms = norms;
        }
        let at = format!("{prefix}.mlp");
        let mlp = match sparse[i] {
            true => FeedForward::Mixture(Box::new(mixture(b, &at)?)),
            false => {
                let field = "intermediate_size_mlp";
                let width = config.required_uint(field, 1..=limits::INTERMEDIATE)?;
                let activation = b.activation(Activation::Silu)?;
                let width = b.part_of(field, width)?;
                FeedForward::Gated(b.gated_mlp(&at, width, activation, false)?)
            }
        };
        b.pre_norm_block(prefix, attention, mlp)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}

/// Returns the growth of queries with their position, for layers without rotation.
fn growth(config: &ModelConfig) -> Result<Option<Growth>> {
    if !config.flag("attn_temperature_tuning")?.unwrap_or(true) {
        return Ok(None);
    }
    let step = config.required_uint("floor_scale", 1..=limits::POSITIONS)?;
    Ok(Some(Growth {
        beta: config.number("attn_scale")?.unwrap_or(0.1),
        step: int("floor_scale", step)?,
        shift: 1,
    }))
}

/// Returns whether each layer has experts: the layers in `moe_layers`, or every n-th layer.
fn sparse_layers(config: &ModelConfig) -> Result<Vec<bool>> {
    let layers = config.num_hidden_layers;
    if let Some(listed) = config.numbers("moe_layers")? {
        return Ok((0..layers).map(|i| listed.contains(&(i as f32))).collect());
    }
    let step = config.uint("interleave_moe_layer_step", 0..=limits::LAYERS)?;
    Ok((0..layers)
        .map(|i| match step.unwrap_or(1) {
            0 => false,
            step => (i + 1).is_multiple_of(step),
        })
        .collect())
}

/// Builds the mixture at `at`. It has a shared expert for all tokens.
fn mixture(b: &mut Builder<'_>, at: &str) -> Result<Mixture> {
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let activation = b.activation(Activation::Silu)?;
    let (count, per_token) = counts(b.config, "num_experts_per_tok")?;
    let places = ExpertsAt {
        stacked: format!("{at}.experts"),
        single: format!("{at}.experts"),
        parts: USUAL_PARTS,
    };
    let shared = b.gated_mlp(&format!("{at}.shared_expert"), width, activation, false)?;
    Ok(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.router"), hidden, count, false)?,
            per_token,
            weighing: Weighing::Sigmoid {
                normalized: false,
                scale: 1.0,
                eps: 0.0,
            },
            choice_bias: None,
            groups: None,
            logit_cap: None,
        },
        experts: experts(b, &places, count, width, Gate::Plain(activation))?,
        shared: Some((SharedExpert::Gated(shared), None)),
        scale: None,
        weighs_inputs: true,
    })
}
