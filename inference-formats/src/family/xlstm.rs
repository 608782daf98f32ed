//! xLSTM.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Names, Recurrence, Windows, fill, is_set, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    sums_in_float32: true,
    ..Family::new(
        "xlstm",
        "xLSTMForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Names of fields that mean something else in other families, each with the usual name.
const ALIASES: Names = &[
    ("embedding_dim", "hidden_size"),
    ("num_blocks", "num_hidden_layers"),
    ("num_heads", "num_attention_heads"),
];

fn complete(map: &mut Map<String, Value>) {
    rename(map, ALIASES);
    if let Some(eps) = map.get("norm_eps").filter(|v| !v.is_null()).cloned() {
        map.insert("rms_norm_eps".into(), eps);
    }
    fill(
        map,
        json!({"vocab_size": 50_304, "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 8, "tie_word_embeddings": false, "eos_token_id": 2,
            "ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64}),
    );
    // A null means that there is no cap, so only a missing field gets the default.
    for (name, cap) in [("gate_soft_cap", 15.0), ("output_logit_soft_cap", 30.0)] {
        map.entry(name).or_insert(json!(cap));
    }
    if !is_set(map, "intermediate_size") {
        let number = |name: &str| map.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
        let multiple = number("ffn_round_up_to_multiple_of");
        // A value that is not a number becomes a null, which is rejected as a missing width.
        let width = number("hidden_size") * number("ffn_proj_factor");
        let width = ((width + multiple - 1.0) / multiple).floor() * multiple;
        map.insert("intermediate_size".into(), json!(width));
    }
}
