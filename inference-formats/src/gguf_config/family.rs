//! Metadata that only some families have, as the fields of their `config.json`.

use crate::error::Result;
use serde_json::{Value, json};

use super::Keys;
use crate::config::limits;
use crate::gguf::{GgufArray, GgufValue};

/// Layers of the largest Gemma 2 and 3. They scale scores by the residual width of a head instead
/// of by `head_dim`. The metadata does not say so.
const GEMMA2_27B: usize = 46;
const GEMMA3_27B: usize = 62;

/// Base of the rotation in Gemma 3's sliding layers. The metadata does not give it.
const GEMMA3_LOCAL_BASE: f32 = 10_000.0;

/// The fields of one family; `null` for a family without own fields.
pub(super) fn fields(
    keys: &Keys<'_>,
    model_type: &str,
    hidden: usize,
    heads: usize,
    head_dim: usize,
) -> Result<Value> {
    let layers = keys.required("block_count", limits::LAYERS)?;
    let window = || keys.uint("attention.sliding_window", 0, limits::POSITIONS);
    // Zero means no window.
    let window = || -> Result<Option<usize>> { Ok(window()?.filter(|n| *n > 0)) };
    let score_dim = |largest| {
        if layers == largest {
            hidden / heads
        } else {
            head_dim
        }
    };
    Ok(match model_type {
        "gemma2" => json!({
            "sliding_window": window()?,
            "attn_logit_softcapping": keys.positive("attn_logit_softcapping")?,
            "final_logit_softcapping": keys.positive("final_logit_softcapping")?,
            "query_pre_attn_scalar": score_dim(GEMMA2_27B),
        }),
        "gemma3_text" => json!({
            "sliding_window": window()?,
            "query_pre_attn_scalar": score_dim(GEMMA3_27B),
            "rope_local_base_freq": keys.positive("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_BASE),
        }),
        "phi3" => json!({"sliding_window": window()?}),
        "olmo2" if window()?.is_some() => json!({
            "model_type": "olmo3",
            "sliding_window": window()?,
            "layer_types": layer_types(keys, layers)?,
            "rope_local_base_freq": keys.positive("rope.freq_base_swa")?,
        }),
        "exaone4" if window()?.is_some() => json!({
            "sliding_window": window()?,
            "layer_types": layer_types(keys, layers)?,
        }),
        "exaone4" => json!({
            "sliding_window": null,
            "layer_types": vec!["full_attention"; layers],
        }),
        "granite" => json!({
            "attention_multiplier": keys.positive("attention.scale")?,
            "embedding_multiplier": keys.positive("embedding_scale")?,
            "residual_multiplier": keys.positive("residual_scale")?,
            "logits_scaling": keys.positive("logit_scale")?,
        }),
        "llama" if experts(keys)?.is_some() => json!({
            "model_type": "mixtral",
            "num_local_experts": experts(keys)?,
            "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        }),
        "qwen2_moe" | "qwen3_moe" => json!({
            "num_experts": experts(keys)?,
            "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
            "moe_intermediate_size":
                keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?,
            "shared_expert_intermediate_size":
                keys.uint("expert_shared_feed_forward_length", 1, limits::INTERMEDIATE)?,
            "norm_topk_prob": model_type == "qwen3_moe",
        }),
        _ if experts(keys)?.is_some() => {
            return Err(keys.unsupported(
                "expert_count",
                "a mixture of experts is not supported in this architecture",
            ));
        }
        _ => Value::Null,
    })
}

/// The kinds of layers: a bool for each, true for sliding ones, or a number n that makes each n-th
/// layer full.
fn layer_types(keys: &Keys<'_>, layers: usize) -> Result<Vec<&'static str>> {
    const NAME: &str = "attention.sliding_window_pattern";
    let slides: Vec<bool> = match keys.metadata.get(&keys.key(NAME)) {
        Some(GgufValue::Array(GgufArray::Bool(listed))) if listed.len() < layers => {
            let message = format!("has {} values; block_count is {layers}", listed.len());
            return Err(keys.wrong(NAME, message));
        }
        Some(GgufValue::Array(GgufArray::Bool(listed))) => listed[..layers].to_vec(),
        _ => {
            let every = keys.uint(NAME, 0, limits::LAYERS)?.unwrap_or(4);
            (1..=layers).map(|n| !n.is_multiple_of(every)).collect()
        }
    };
    let name = |slides| match slides {
        true => "sliding_attention",
        false => "full_attention",
    };
    Ok(slides.into_iter().map(name).collect())
}

/// Experts in a mixture, where there is one.
fn experts(keys: &Keys<'_>) -> Result<Option<usize>> {
    Ok(keys
        .uint("expert_count", 0, limits::EXPERTS)?
        .filter(|n| *n > 0))
}
