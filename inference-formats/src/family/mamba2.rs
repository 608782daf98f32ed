//! Mamba-2.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set, rename};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    ..Family::new(
        "mamba2",
        "Mamba2ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8,
            "conv_kernel": 4, "use_bias": false, "tie_word_embeddings": false}),
    );
    rename(
        map,
        &[
            ("num_heads", "num_attention_heads"),
            ("state_size", "ssm_state_size"),
        ],
    );
    if !is_set(map, "intermediate_size") {
        let number = |name: &str| map.get(name).and_then(Value::as_u64).unwrap_or(0);
        let width = number("num_heads").saturating_mul(number("head_dim"));
        map.insert("intermediate_size".into(), json!(width));
    }
}
