//! Gemma 3n: text models, and the text part of multimodal ones.

use serde_json::{Map, Value, json};

use super::{ChatFormat, Defaults, Family, Windows, fill, is_set};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    complete,
    multimodal: &["gemma3n"],
    chat: Some(ChatFormat::Gemma),
    pipeline: false,
    ..Family::new(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 1e6,
            windows: Windows::AllBut {
                every: 5,
                last_is_full: false,
            },
        },
    )
};

/// Layers may have different feed-forward widths. `intermediate_size` becomes the greatest.
fn prepare(map: &mut Map<String, Value>) {
    if let Some(Value::Array(widths)) = map.get("intermediate_size").cloned() {
        if let Some(widest) = widths.iter().filter_map(Value::as_u64).max() {
            map.insert("intermediate_size".into(), json!(widest));
        }
        map.insert("intermediate_sizes".into(), widths.into());
    }
}

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256, "sliding_window": 512,
            "rope_local_base_freq": 1e4, "num_kv_shared_layers": 15, "laurel_rank": 64,
            "altup_num_inputs": 4, "altup_active_idx": 0, "final_logit_softcapping": 30.0,
            "tie_word_embeddings": true}),
    );
    // In models with more than 10 layers, the gates of the first 10 are sparse.
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "activation_sparsity_pattern")
    {
        let sparse = if layers > 10 { 10 } else { 0 };
        let shares = (0..layers).map(|layer| if layer < sparse { 0.95 } else { 0.0 });
        let shares: Vec<f64> = shares.collect();
        map.insert("activation_sparsity_pattern".into(), shares.into());
    }
}
