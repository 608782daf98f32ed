//! Apertus.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, is_set};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".attention_layernorm.", ".input_layernorm."),
        (".feedforward_layernorm.", ".post_attention_layernorm."),
    ],
    pipeline: false,
    ..Family::new(
        "apertus",
        "ApertusForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 12e6,
            windows: Windows::Never,
        },
    )
};

/// The reference scales positions even if the file does not say so.
fn complete(map: &mut Map<String, Value>) {
    if !is_set(map, "rope_parameters") && !map.contains_key("rope_scaling") {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        map.insert("rope_scaling".into(), scaling);
    }
}
