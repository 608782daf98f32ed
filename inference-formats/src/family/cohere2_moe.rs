//! Cohere's mixtures of experts.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, is_set, list_layers, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    complete,
    reply: Some("command_r"),
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

/// The first layers may be dense, with separate windows.
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
