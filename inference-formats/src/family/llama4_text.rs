//! Llama 4.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    multimodal: &["llama4"],
    reply: Some("pythonic"),
    names: &[(".feed_forward.", ".mlp.")],
    pipeline: false,
    ..Family::new(
        "llama4_text",
        "Llama4ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::Never,
        },
    )
};

/// Layers with rotation attend to chunks of positions. As with sliding windows, the cache drops
/// earlier keys.
fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "use_qk_norm": true, "no_rope_layer_interval": 4,
            "attn_temperature_tuning": true, "floor_scale": 8192, "attn_scale": 0.1,
            "intermediate_size_mlp": 16384, "tie_word_embeddings": false}),
    );
    // A null means no chunks, so only a missing field gets the default.
    let chunk = map.get("attention_chunk_size").cloned();
    map.insert("sliding_window".into(), chunk.unwrap_or(json!(8192)));
    // An empty list means the default.
    if map.get("no_rope_layers") == Some(&json!([])) {
        map.remove("no_rope_layers");
    }
    let interval = map.get("no_rope_layer_interval").and_then(Value::as_u64);
    let interval = interval.unwrap_or(4).max(1);
    let listed = map.get("no_rope_layers").and_then(Value::as_array).cloned();
    let rotates = |layer: usize| match &listed {
        Some(listed) => listed.get(layer).and_then(Value::as_u64) != Some(0),
        None => !(layer as u64 + 1).is_multiple_of(interval),
    };
    if let Some(kinds) = map.get_mut("layer_types").and_then(Value::as_array_mut) {
        for kind in kinds
            .iter_mut()
            .filter(|kind| **kind == "chunked_attention")
        {
            *kind = "sliding_attention".into();
        }
    }
    super::list_layers(map, |layer| match rotates(layer) {
        true => "sliding_attention",
        false => "full_attention",
    });
}
