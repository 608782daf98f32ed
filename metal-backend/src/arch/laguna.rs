//! Laguna (Poolside 2026; reference: `modeling_laguna` of Hugging Face transformers). Layers differ
//! in their rotation and in their number of query heads. The outputs of heads have softplus gates.
//! The first layers are dense; the others have experts.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, int, invalid};
use super::build_attention::AttentionParts;
use super::moe::{USUAL_PARTS, routed_block};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::loader::Weights;
use crate::nn::GatedAttention;
use crate::nn::gated_attention::{GateFunction, OutputGate};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    if config.flag("moe_apply_router_weight_on_input")? == Some(true) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "moe_apply_router_weight_on_input is true; only weights on the experts' outputs are \
             supported",
        ));
    }
    let heads = heads(config)?;
    let gating = gating(config)?;
    let qkv_bias = config.flag("qkv_bias")?.unwrap_or(config.attention_bias);
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        b.dims.n_heads = heads.get(i).copied().unwrap_or(b.dims.n_heads);
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias,
            o_bias: b.config.attention_bias,
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.norms = b.head_norms(&at)?;
        let width = match gating {
            Gating::Heads => attention.n_heads,
            Gating::Elements => attention.n_heads * attention.head_dim,
        };
        let gate = Some(OutputGate {
            linear: b.linear(&format!("{at}.g_proj"), b.dims.hidden, width, false)?,
            function: GateFunction::Softplus,
        });
        let mlp = routed_block(b, i, prefix, USUAL_PARTS)?;
        b.pre_norm_block(prefix, GatedAttention { attention, gate }, mlp)
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

/// The number of gates.
#[derive(Debug, Clone, Copy)]
enum Gating {
    /// One gate for each head.
    Heads,
    /// One gate for each element of each head.
    Elements,
}

fn gating(config: &ModelConfig) -> Result<Gating> {
    match config.fields.get("gating") {
        None | Some(serde_json::Value::Bool(true)) => Ok(Gating::Heads),
        Some(serde_json::Value::String(name)) if name == "per-head" => Ok(Gating::Heads),
        Some(serde_json::Value::String(name)) if name == "per-element" => Ok(Gating::Elements),
        Some(_) => Err(Error::new(
            ErrorKind::Unsupported,
            "gating has an unsupported value; supported are true, \"per-head\" and \"per-element\"",
        )),
    }
}

/// Returns the number of query heads of each layer. The list is empty if the configuration has one
/// number for all layers.
fn heads(config: &ModelConfig) -> Result<Vec<i32>> {
    const NAME: &str = "num_attention_heads_per_layer";
    let Some(numbers) = config.numbers(NAME)? else {
        return Ok(Vec::new());
    };
    if numbers.len() != config.num_hidden_layers {
        return Err(invalid(format!(
            "{NAME} has {} numbers; there are {} layers",
            numbers.len(),
            config.num_hidden_layers
        )));
    }
    let groups = config.num_key_value_heads;
    let possible = |n: &f32| n.fract() == 0.0 && (1.0..=limits::HEADS as f32).contains(n);
    numbers
        .into_iter()
        .map(|n| match Some(n).filter(possible).map(|n| n as usize) {
            Some(heads) if heads.is_multiple_of(groups) => int(NAME, heads),
            _ => Err(invalid(format!(
                "{NAME} has {n}; num_key_value_heads, which is {groups}, must divide each number"
            ))),
        })
        .collect()
}
