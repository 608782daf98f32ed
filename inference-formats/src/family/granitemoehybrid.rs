//! Granite 4: layers of Mamba-2 beside attention, with experts or dense.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, list_layers, rename};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("hermes"),
    ..Family::new(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_d_head": "auto", "mamba_proj_bias": false, "tie_word_embeddings": false}),
    );
    if map.get("mamba_d_head") == Some(&json!("auto")) {
        let number = |name: &str| map.get(name).and_then(Value::as_u64).unwrap_or(0);
        let width = number("mamba_expand").saturating_mul(number("hidden_size"));
        // Without heads it becomes a null, which is refused as a missing width.
        let dim = width.checked_div(number("mamba_n_heads"));
        map.insert("mamba_d_head".into(), json!(dim));
    }
    rename(map, &[("layers_block_type", "layer_types")]);
    list_layers(map, |_| "mamba");
}
