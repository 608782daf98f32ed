//! Nemotron-H: blocks of one part each.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set, rename};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    spare: &["mtp."],
    ..Family::new(
        "nemotron_h",
        "NemotronHForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("n_routed_experts", "num_local_experts"),
            ("layers_block_type", "layer_types"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "mlp_hidden_act": "relu2",
            "tie_word_embeddings": false}),
    );
    // A list of letters, or one text of them.
    let letters = match map.get("hybrid_override_pattern") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).collect(),
        _ => String::new(),
    };
    if !letters.is_empty() && !is_set(map, "layer_types") {
        let kinds: Vec<String> = letters.chars().map(kind).collect();
        map.insert("layer_types".into(), json!(kinds));
    }
    // Newer files name kinds as other families do.
    if let Some(Value::Array(kinds)) = map.get_mut("layer_types") {
        for kind in kinds {
            match kind.as_str() {
                Some("linear_attention") => *kind = json!("mamba"),
                Some("attention") => *kind = json!("full_attention"),
                _ => {}
            }
        }
    }
    // The reference counts the kinds, whatever the file says.
    if let Some(Value::Array(kinds)) = map.get("layer_types") {
        map.insert("num_hidden_layers".into(), json!(kinds.len()));
    }
}

/// The kind that a letter stands for. Another one stands for itself and is refused.
fn kind(letter: char) -> String {
    match letter {
        'M' => "mamba".into(),
        '*' => "full_attention".into(),
        '-' => "mlp".into(),
        'E' => "moe".into(),
        other => other.into(),
    }
}
