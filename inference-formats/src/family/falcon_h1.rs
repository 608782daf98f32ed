//! Falcon-H1: attention and Mamba-2 side by side in each block.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Beside,
    ..Family::new(
        "falcon_h1",
        "FalconH1ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn complete(map: &mut Map<String, Value>) {
    // Every block is of the same kind.
    map.remove("layer_types");
    fill(
        map,
        json!({"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_d_head": "auto", "mamba_norm_before_gate": true,
            "tie_word_embeddings": false}),
    );
    if map.get("mamba_d_head") == Some(&json!("auto")) {
        let number = |name: &str| map.get(name).and_then(Value::as_u64);
        let width = number("mamba_d_ssm").or_else(|| {
            let hidden = number("hidden_size")?;
            Some(number("mamba_expand")?.saturating_mul(hidden))
        });
        // Without heads it becomes a null, which is refused as a missing width.
        let heads = number("mamba_n_heads").unwrap_or(0);
        let dim = width.and_then(|width| width.checked_div(heads));
        map.insert("mamba_d_head".into(), json!(dim));
    }
}
