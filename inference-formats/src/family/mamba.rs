//! Mamba.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    ..Family::new(
        "mamba",
        "MambaForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// There are no heads; each channel has its own state.
pub(super) fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"state_size": 16, "conv_kernel": 4, "expand": 2, "use_bias": false,
            "num_attention_heads": 1, "tie_word_embeddings": true}),
    );
    let number = |map: &Map<String, Value>, name: &str| map.get(name).and_then(Value::as_u64);
    let hidden = number(map, "hidden_size").unwrap_or(0);
    if !is_set(map, "intermediate_size") {
        let expand = number(map, "expand").unwrap_or(0);
        map.insert(
            "intermediate_size".into(),
            json!(hidden.saturating_mul(expand)),
        );
    }
    rank(map, "time_step_rank");
}

/// The rank of the time-step projection. `auto` means a sixteenth of the hidden width.
pub(super) fn rank(map: &mut Map<String, Value>, name: &str) {
    let hidden = map.get("hidden_size").and_then(Value::as_u64).unwrap_or(0);
    if !is_set(map, name) || map.get(name) == Some(&json!("auto")) {
        map.insert(name.into(), json!(hidden.div_ceil(16)));
    }
}
