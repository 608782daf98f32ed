//! MiMo-V2-Flash.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, is_set, list_layers, rename};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare: |map| rename(map, &[("layernorm_epsilon", "rms_norm_eps")]),
    complete,
    names: &[(".self_attn.attention_sink_bias", ".self_attn.sinks")],
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["model.mtp."],
    pipeline: false,
    ..Family::new(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 5e6,
            windows: Windows::Never,
        },
    )
};

/// Lists of numbers say which layers slide and which have experts.
fn complete(map: &mut Map<String, Value>) {
    // In the reference implementation, a query attends to this number of positions before its own.
    let before = map.get("sliding_window_size").and_then(Value::as_u64);
    if let Some(before) = before {
        let window = before.saturating_add(1);
        map.insert("sliding_window".into(), json!(window));
    }
    fill(
        map,
        json!({"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4,
            "sliding_window": 129, "attention_value_scale": 0.707, "partial_rotary_factor": 0.334,
            "swa_rope_theta": 10_000.0, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 0,
            "tie_word_embeddings": false}),
    );
    let number = |name: &str| map.get(name).and_then(Value::as_u64);
    let heads = number("num_key_value_heads").unwrap_or(4);
    fill(
        map,
        json!({"swa_num_key_value_heads": heads.saturating_mul(2)}),
    );
    let flags = |map: &Map<String, Value>, name: &str| -> Option<Vec<bool>> {
        let numbers = map.get(name)?.as_array()?.iter();
        Some(numbers.map(|n| n.as_u64() == Some(1)).collect())
    };
    let slides = flags(map, "hybrid_layer_pattern");
    list_layers(map, |layer| {
        let slides = match &slides {
            Some(slides) => slides.get(layer) == Some(&true),
            None => layer != 0 && !(layer + 1).is_multiple_of(6),
        };
        match slides {
            true => "sliding_attention",
            false => "full_attention",
        }
    });
    let sparse = flags(map, "moe_layer_freq");
    if sparse.is_some() {
        map.remove("moe_layer_freq");
    }
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "mlp_layer_types")
    {
        let is_sparse = |layer: usize| match &sparse {
            Some(sparse) => sparse.get(layer) == Some(&true),
            None => layer > 0,
        };
        let kinds: Vec<_> = (0..layers as usize)
            .map(|layer| match is_sparse(layer) {
                true => "sparse",
                false => "dense",
            })
            .collect();
        map.insert("mlp_layer_types".into(), kinds.into());
    }
    if !is_set(map, "rope_parameters") {
        let of = |theta: &str| {
            json!({"rope_type": "default", "rope_theta": map.get(theta),
                "partial_rotary_factor": map.get("partial_rotary_factor")})
        };
        let both = json!({"full_attention": of("rope_theta"),
            "sliding_attention": of("swa_rope_theta")});
        map.insert("rope_parameters".into(), both);
    }
}
