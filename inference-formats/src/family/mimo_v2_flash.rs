//! MiMo-V2-Flash.

use serde_json::{Map, Value, json};

use super::gguf::joined;
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Windows, fill, is_set, list_layers, list_mixtures,
    rename, routed,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare: |map| rename(map, &[("layernorm_epsilon", "rms_norm_eps")]),
    complete,
    names: &[(".self_attn.attention_sink_bias", ".self_attn.sinks")],
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["model.mtp."],
    gguf: Some(GgufFamily {
        layers_differ: true,
        narrow_values: true,
        read,
        overrides: &[("attn_sinks", "self_attn.sinks")],
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("mimo2")
    }),
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

/// Reads the fields of a GGUF file. Readers of these files always normalize the experts' weights.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    const HEADS: &str = "attention.head_count_kv";
    let keys = &header.keys;
    let kinds = header.layer_types()?;
    let heads = header.by_layer(HEADS, (1, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let of = |kind| header.of_kind(HEADS, &heads, &kinds, kind);
    let (full, sliding) = (of("full_attention")?, of("sliding_attention")?);
    let base = keys.positive("rope.freq_base")?.unwrap_or(10_000.0);
    let sliding_base = keys.positive("rope.freq_base_swa")?.unwrap_or(base);
    let rotated = keys.uint("rope.dimension_count", 1, header.head_dim)?;
    let part = rotated.map_or(1.0, |n| n as f64 / header.head_dim as f64);
    let rotation = |base: f32| json!({"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part});
    let own = json!({
        "layer_types": kinds,
        "mlp_layer_types": header.mixtures(),
        "sliding_window": header.window()?,
        "num_key_value_heads": full.or(sliding),
        "swa_num_key_value_heads": sliding.or(full),
        "v_head_dim": keys.required("attention.value_length", limits::HEAD_DIM)?,
        "attention_value_scale": keys.positive("attention.value_scale")?.unwrap_or(1.0),
        "rope_parameters": {
            "full_attention": rotation(base),
            "sliding_attention": rotation(sliding_base),
        },
    });
    Ok(joined(
        routed::read(header, &routed::NORMALIZED_SIGMOIDS)?,
        own,
    ))
}

/// Fills in missing fields, and lists which layers have a sliding window and which have experts. In
/// the file, these are lists of the numbers 0 and 1.
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
    list_mixtures(map, |layer| match &sparse {
        Some(sparse) => sparse.get(layer) == Some(&true),
        None => layer > 0,
    });
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
