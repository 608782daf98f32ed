//! Step 3.5 (StepFun 2026; references: the text part of `modeling_step3p7` of Hugging Face
//! transformers, and mlx-lm). Full and sliding layers differ in their rotation and in their number
//! of query heads. Each head's output has a gate. In some layers, the feed-forward gates have upper
//! limits.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, NormKind, int, invalid};
use super::build_attention::AttentionParts;
use super::moe::{Limits, USUAL_PARTS, limited_block};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::loader::Weights;
use crate::nn::GatedAttention;
use crate::nn::gated_attention::{GateFunction, OutputGate};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let gated = config.flag("use_head_wise_attn_gate")?.unwrap_or(true);
    let heads = heads(config)?;
    let kind = norms(config, weights);
    let mut b = Builder::new(config, weights)?.with_norms(kind);
    b.ignore_predicting_layers()?;
    let blocks = b.blocks(|b, i, prefix| {
        b.dims.n_heads = heads[usize::from(b.config.slides(i))];
        let at = format!("{prefix}.self_attn");
        let mut attention = b.attention(i, &at, AttentionParts::default())?;
        attention.norms = b.head_norms(&at)?;
        let gate = match gated {
            true => Some(OutputGate {
                linear: b.linear(
                    &format!("{at}.g_proj"),
                    b.dims.hidden,
                    attention.n_heads,
                    false,
                )?,
                function: GateFunction::Sigmoid,
            }),
            false => {
                let message = "use_head_wise_attn_gate is false; attention without gates is not \
                               supported";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        };
        let limits = Limits {
            experts: limit(b.config, "swiglu_limits", i)?,
            shared: limit(b.config, "swiglu_limits_shared", i)?,
        };
        let mlp = limited_block(b, i, prefix, USUAL_PARTS, limits)?;
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

/// Returns the numbers of query heads of full layers and of sliding layers.
fn heads(config: &ModelConfig) -> Result<[i32; 2]> {
    let (full, groups) = (config.num_attention_heads, config.num_key_value_heads);
    let sliding = config
        .uint("num_sliding_attention_heads", 1..=limits::HEADS)?
        .unwrap_or(full);
    if !sliding.is_multiple_of(groups) {
        return Err(invalid(format!(
            "num_attention_groups is {groups}; it must divide the {sliding} heads of sliding layers"
        )));
    }
    let others = config.uint("num_sliding_attention_groups", 1..=limits::HEADS)?;
    if let Some(others) = others.filter(|others| *others != groups) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "sliding layers have {others} key heads and full layers have {groups}; only equal \
                 numbers are supported"
            ),
        ));
    }
    let name = "num_attention_heads";
    Ok([int(name, full)?, int(name, sliding)?])
}

/// Returns the formula of norms. They add 1 to the stored weights, unless mlx-lm has converted the
/// checkpoint and added it. mlx-lm also renames the experts; this is how its checkpoints are
/// recognized.
fn norms(config: &ModelConfig, weights: &Weights) -> NormKind {
    let renamed = (0..config.num_hidden_layers).any(|layer| {
        weights.contains(&format!(
            "model.layers.{layer}.mlp.switch_mlp.gate_proj.weight"
        ))
    });
    match renamed && !weights.is_gguf() {
        true => NormKind::Rms,
        false => NormKind::RmsPlusOne,
    }
}

/// Returns the limit of a layer's gates from the list `name`; `None` if it is missing, null or 0.
fn limit(config: &ModelConfig, name: &str, layer: usize) -> Result<Option<f32>> {
    let fault = || {
        invalid(format!(
            "{name} must be a list of numbers from 0 on, one for each layer"
        ))
    };
    let Some(list) = config.fields.get(name).filter(|list| !list.is_null()) else {
        return Ok(None);
    };
    let entry = list.as_array().and_then(|list| list.get(layer));
    let entry = entry.ok_or_else(fault)?;
    if entry.is_null() {
        return Ok(None);
    }
    let limit = entry.as_f64().map(|limit| limit as f32);
    let limit = limit.filter(|limit| limit.is_finite() && *limit >= 0.0);
    Ok(Some(limit.ok_or_else(fault)?).filter(|limit| *limit > 0.0))
}
