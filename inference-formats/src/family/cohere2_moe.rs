//! Cohere's mixtures of experts.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Windows, fill, is_set, list_layers, rename, routed,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    complete,
    reply: Some("command_r"),
    gguf: Some(GgufFamily {
        read,
        write: |config| {
            if config.get("norm_type") == Some(&json!("layer")) {
                publish(config, &[("rms_norm_eps", "layer_norm_eps")]);
            }
        },
        overrides: routed::names!(),
        ..GgufFamily::new("cohere2moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};

/// The name of the epsilon field determines the formula of norms.
fn prepare(map: &mut Map<String, Value>) {
    if !is_set(map, "norm_type") {
        let kind = match is_set(map, "rms_norm_eps") {
            true => "rms",
            false => "layer",
        };
        map.insert("norm_type".into(), kind.into());
    }
}

/// Fills in missing fields, and lists which layers have a window. The first layers may be dense,
/// with windows at another interval.
fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"logit_scale": 0.0625, "sliding_window": 4096, "num_experts": 8,
            "num_experts_per_tok": 2, "num_shared_experts": 0, "norm_topk_prob": true,
            "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax",
            "sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1,
            "first_k_dense_replace": 0}),
    );
    rename(
        map,
        &[("intermediate_size", "prefix_dense_intermediate_size")],
    );
    let number = |name: &str| {
        let value = map.get(name).and_then(Value::as_u64);
        value.and_then(|n| usize::try_from(n).ok()).unwrap_or(0)
    };
    let dense = number("first_k_dense_replace");
    let [first, rest] = [
        "prefix_dense_sliding_window_pattern",
        "sliding_window_pattern",
    ]
    .map(|name| number(name).max(1));
    list_layers(map, |layer| {
        let is_full = match layer.checked_sub(dense) {
            None => (layer + 1).is_multiple_of(first),
            Some(layer) => (layer + 1).is_multiple_of(rest),
        };
        match is_full {
            true => "full_attention",
            false => "sliding_attention",
        }
    });
}

/// Reads the fields of a GGUF file. The key of the epsilon determines the formula of norms.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    const SCALE: &str = "expert_weights_scale";
    let keys = &header.keys;
    let experts = header.experts()?;
    let width = keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?;
    let normalized = keys.metadata.bool(&keys.key("expert_weights_norm"))?;
    let norms = match keys.positive("attention.layer_norm_rms_epsilon")? {
        Some(_) => "rms",
        None => "layer",
    };
    if let Some(scale) = keys.positive(SCALE)?.filter(|scale| *scale != 1.0) {
        return Err(keys.unsupported(SCALE, format!("is {scale}; only 1 is supported")));
    }
    Ok(json!({
        "norm_type": norms,
        "layer_types": header.layer_types_full_first()?,
        "mlp_layer_types": header.mixtures(),
        "sliding_window": header.window()?,
        "logit_scale": keys.positive("logit_scale")?,
        "intermediate_size": width,
        "prefix_dense_intermediate_size":
            keys.uint("feed_forward_length", 1, limits::INTERMEDIATE)?,
        "num_experts": experts.ok_or_else(|| keys.metadata.missing(&keys.key("expert_count")))?,
        "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        "num_shared_experts": keys.uint("expert_shared_count", 0, limits::EXPERTS)?.unwrap_or(0),
        "expert_selection_fn": routed::scoring(header)?.unwrap_or("sigmoid"),
        "norm_topk_prob": normalized.unwrap_or(false),
    }))
}
