//! Llama 4.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    multimodal: &["llama4"],
    reply: Some("pythonic"),
    names: &[(".feed_forward.", ".mlp.")],
    gguf: Some(GgufFamily {
        // Directories have fused stacks of experts.
        runs_only: true,
        optional_biases: true,
        read,
        overrides: &[
            ("ffn_gate_inp", "mlp.router"),
            ("ffn_gate_exps", "mlp.experts.gate_proj"),
            ("ffn_up_exps", "mlp.experts.up_proj"),
            ("ffn_down_exps", "mlp.experts.down_proj"),
            ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
        ],
        ..GgufFamily::new("llama4")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    joined_experts: super::JoinedExperts::stacks(".experts", false),
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

/// Experts of Maverick, the published model without norms of query and key heads.
const MAVERICK: usize = 128;

/// Reads the fields of a GGUF file. The file does not contain the chunk size, the layers that
/// rotate, or the growth of queries; the defaults are those of the published models. A window of 0
/// disables all three.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let experts = header.experts()?;
    let width = "expert_feed_forward_length";
    let mut fields = json!({
        "intermediate_size": keys.required(width, limits::INTERMEDIATE)?,
        "intermediate_size_mlp": keys.required("feed_forward_length", limits::INTERMEDIATE)?,
        "num_local_experts": experts,
        "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        "interleave_moe_layer_step":
            keys.uint("interleave_moe_layer_step", 0, limits::LAYERS)?.unwrap_or(1),
        "use_qk_norm": experts != Some(MAVERICK),
    });
    if keys.uint("attention.sliding_window", 0, limits::POSITIONS)? == Some(0) {
        fields["attention_chunk_size"] = Value::Null;
        fields["no_rope_layers"] = json!(vec![1; header.layers]);
        fields["attn_temperature_tuning"] = json!(false);
    }
    Ok(fields)
}

/// Fills in missing fields, and lists which layers attend to all positions. The layers with
/// rotation attend to chunks of positions. They are listed as layers with a sliding window, because
/// their caches also drop earlier keys.
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
