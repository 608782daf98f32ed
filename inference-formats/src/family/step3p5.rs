//! Step 3.5 Flash.

use serde_json::{Map, Value, json};

use super::gguf::{GgufChange, joined};
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Windows, fill, is_set, list_layers, rename, routed,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".moe.gate.", ".mlp.gate."),
        (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
        (".moe.", ".mlp.experts."),
        // mlx-lm's names.
        (".mlp.gate.gate.", ".mlp.gate."),
        (".mlp.gate.router_bias", ".mlp.gate.e_score_correction_bias"),
        (".mlp.share_expert.", ".share_expert."),
        (".share_expert.", ".mlp.shared_experts."),
    ],
    gguf: Some(GgufFamily {
        norm_plus_one: true,
        // A directory with mlx-lm's names of experts has norms to which 1 was added.
        keeps_plus_one: true,
        write,
        // With other names of the router's tensors, mlx-lm would add the 1 again.
        changes: &[
            (
                ".mlp.gate.weight",
                GgufChange::Named(".mlp.gate.gate.weight"),
            ),
            (
                ".mlp.gate.e_score_correction_bias",
                GgufChange::Named(".mlp.gate.router_bias"),
            ),
        ],
        layers_differ: true,
        heads_differ: true,
        full_layers_scale: true,
        read,
        overrides: routed::names!(("attn_gate", "self_attn.g_proj")),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("step35")
    }),
    ..Family::new(
        "step3p5",
        "Step3p5ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies fields of attention and experts to their usual names, and fills in missing fields.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("num_attention_groups", "num_key_value_heads"),
            ("moe_num_experts", "n_routed_experts"),
            ("moe_top_k", "num_experts_per_tok"),
            ("moe_router_scaling_factor", "routed_scaling_factor"),
            ("norm_expert_weight", "norm_topk_prob"),
            ("share_expert_dims", "share_expert_dim"),
            ("share_expert_dim", "moe_shared_expert_intermediate_size"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "num_key_value_heads": 8, "n_routed_experts": 288,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 1280, "norm_topk_prob": true,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "use_head_wise_attn_gate": true, "tie_word_embeddings": false}),
    );
    list_layers(map, |_| "full_attention");
    let heads = |map: &Map<String, Value>, name: &str| {
        map.get("attention_other_setting")
            .and_then(|other| other.get(name))
            .filter(|heads| !heads.is_null())
            .cloned()
    };
    for (name, sliding) in [
        ("num_attention_heads", "num_sliding_attention_heads"),
        ("num_attention_groups", "num_sliding_attention_groups"),
    ] {
        if let Some(heads) = heads(map, name)
            && !is_set(map, sliding)
        {
            map.insert(sliding.to_owned(), heads);
        }
    }
    list_mixtures(map);
    list_rotations(map);
}

/// Reads the fields of a GGUF file. In full layers, half of each head rotates.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let kinds = header.layer_types()?;
    let number = |key: &str, kind: &str| -> Result<Option<usize>> {
        let numbers = header.by_layer(key, (1, limits::HEADS))?;
        let numbers = numbers.unwrap_or_else(|| vec![header.heads; header.layers]);
        header.of_kind(key, &numbers, &kinds, kind)
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let (query, key) = ("attention.head_count", "attention.head_count_kv");
    let (heads, sliding_heads) = (number(query, full)?, number(query, sliding)?);
    let (groups, sliding_groups) = (number(key, full)?, number(key, sliding)?);
    let base = keys.positive("rope.freq_base")?.unwrap_or(10_000.0);
    let sliding_base = keys.positive("rope.freq_base_swa")?.unwrap_or(base);
    let limits_of = |name: &str| keys.metadata.f32s(&keys.key(name));
    let own = json!({
        "layer_types": kinds,
        "mlp_layer_types": header.mixtures(),
        "sliding_window": header.window()?,
        "num_attention_heads": heads.or(sliding_heads),
        "num_key_value_heads": groups.or(sliding_groups),
        "num_sliding_attention_heads": sliding_heads,
        "num_sliding_attention_groups": sliding_groups,
        "rope_parameters": {
            full: {"rope_theta": base, "partial_rotary_factor": 0.5},
            sliding: {"rope_theta": sliding_base, "partial_rotary_factor": 1.0},
        },
        "swiglu_limits": limits_of("swiglu_clamp_exp")?,
        "swiglu_limits_shared": limits_of("swiglu_clamp_shexp")?,
    });
    Ok(joined(routed::read(header, &routed::SIGMOIDS)?, own))
}

/// Adds the fields of transformers and mlx-lm, which have other names, and lists of rotations.
fn write(map: &mut Map<String, Value>) {
    for (from, to) in [
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
        ("routed_scaling_factor", "moe_router_scaling_factor"),
        ("norm_topk_prob", "norm_expert_weight"),
        ("moe_shared_expert_intermediate_size", "share_expert_dim"),
    ] {
        if let Some(value) = map.get(from).cloned() {
            map.entry(to).or_insert(value);
        }
    }
    let list = |name: &str| map.get(name).and_then(Value::as_array).cloned();
    let (kinds, mixtures) = (list("layer_types"), list("mlp_layer_types"));
    let numbers: Option<Vec<String>> = mixtures.map(|kinds| {
        let numbered = (0..).zip(kinds);
        (numbered.filter(|(_, kind)| kind == "sparse"))
            .map(|(layer, _): (usize, _)| layer.to_string())
            .collect()
    });
    if let Some(numbers) = numbers {
        map.insert("moe_layers_enum".into(), numbers.join(",").into());
    }
    let mut other = Map::new();
    for (from, to) in [
        ("num_sliding_attention_heads", "num_attention_heads"),
        ("num_sliding_attention_groups", "num_attention_groups"),
    ] {
        if let Some(value) = map.get(from).filter(|value| !value.is_null()).cloned() {
            other.insert(to.into(), value);
        }
    }
    if !other.is_empty() {
        other.insert("attention_type".into(), "sliding_attention".into());
        if let Some(dim) = map.get("head_dim").cloned() {
            other.insert("head_dim".into(), dim);
        }
        map.insert("attention_other_setting".into(), other.into());
    }
    if let (Some(kinds), Some(rotations)) = (kinds, map.get("rope_parameters").cloned()) {
        let rotation = |kind: &Value| kind.as_str().and_then(|kind| rotations.get(kind));
        for (from, to) in [
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factor", "partial_rotary_factors"),
        ] {
            let values: Option<Vec<Value>> = (kinds.iter())
                .map(|kind| rotation(kind)?.get(from).cloned())
                .collect();
            if let Some(values) = values {
                map.insert(to.into(), values.into());
            }
        }
        let full = rotations.get("full_attention").and_then(Value::as_object);
        if let Some(full) = full.filter(|full| full.contains_key("rope_type")) {
            let mut scaling = full.clone();
            scaling.retain(|name, _| !["rope_theta", "partial_rotary_factor"].contains(&&**name));
            map.insert("rope_scaling".into(), scaling.into());
            map.insert("yarn_only_types".into(), json!(["full_attention"]));
        }
    }
}

/// Lists which layers have experts. Older files have their numbers as one text.
fn list_mixtures(map: &mut Map<String, Value>) {
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64) else {
        return;
    };
    if let Some(Value::Array(kinds)) = map.get_mut("mlp_layer_types") {
        // The remaining entries belong to layers for multi-token prediction.
        kinds.truncate(usize::try_from(layers).unwrap_or(usize::MAX));
        return;
    }
    let numbers: Option<Vec<u64>> = match map.get("moe_layers_enum") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => (text.split(',').map(str::trim))
            .filter(|number| !number.is_empty())
            .map(|number| number.parse().ok())
            .collect(),
        Some(Value::Array(numbers)) => numbers.iter().map(Value::as_u64).collect(),
        // A list of layers that cannot be read is rejected later.
        Some(_) => Some(Vec::new()),
    };
    let numbers = numbers.unwrap_or_else(|| (3..layers).collect());
    super::list_mixtures(map, |layer| numbers.contains(&(layer as u64)));
}

/// Converts rotation parameters per layer to parameters per kind of layer.
fn list_rotations(map: &mut Map<String, Value>) {
    let kinds = ["full_attention", "sliding_attention"];
    let grouped = map
        .get("rope_parameters")
        .is_some_and(|all| kinds.iter().any(|kind| all.get(kind).is_some()));
    let Some(Value::Array(layers)) = map.get("layer_types").filter(|_| !grouped) else {
        return;
    };
    // The value that all layers of a kind share. If their values differ, the list is kept, and a
    // later check rejects it.
    let common = |value: &Value, kind: &str| -> Value {
        let Value::Array(values) = value else {
            return value.clone();
        };
        let of_kind = || (layers.iter().zip(values)).filter(|(layer, _)| *layer == kind);
        match of_kind().next() {
            Some((_, first)) if of_kind().all(|(_, other)| other == first) => first.clone(),
            _ => value.clone(),
        }
    };
    let scaled = match map.get("yarn_only_types") {
        Some(Value::Array(kinds)) => kinds.clone(),
        _ => vec![json!("full_attention")],
    };
    let mut all = Map::new();
    for kind in kinds {
        if !layers.iter().any(|layer| layer == kind) {
            continue;
        }
        let mut rotation = match map.get("rope_scaling") {
            Some(Value::Object(scaling)) if scaled.iter().any(|name| name == kind) => {
                scaling.clone()
            }
            _ => Map::new(),
        };
        for (from, to) in [
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factors", "partial_rotary_factor"),
        ] {
            if let Some(value) = map.get(from).filter(|value| !value.is_null()) {
                rotation.insert(to.to_owned(), common(value, kind));
            }
        }
        all.insert(kind.to_owned(), rotation.into());
    }
    map.insert("rope_parameters".into(), all.into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    fn config(more: Value) -> Result<ModelConfig> {
        let mut fields = json!({"model_type": "step3p5", "hidden_size": 32, "vocab_size": 64,
            "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4,
            "num_attention_groups": 2, "head_dim": 8, "moe_layers_enum": "1, 2",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 16, "rope_theta": [5e6, 1e4, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0],
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}});
        let (Some(map), Value::Object(more)) = (fields.as_object_mut(), more) else {
            panic!("not an object");
        };
        map.extend(more);
        ModelConfig::from_map(map.clone())
    }

    #[test]
    fn rotations_and_experts_of_layers_are_grouped() {
        let read = config(json!({})).unwrap();
        assert_eq!((read.rope.theta, read.rope.partial), (5e6, 0.5));
        assert_eq!(read.rope_of(2).theta, 1e4);
        assert_eq!(read.num_key_value_heads, 2);
        let kinds = read.fields.get("mlp_layer_types");
        assert_eq!(kinds, Some(&json!(["dense", "sparse", "sparse"])));
        let heads = read.fields.get("num_sliding_attention_heads");
        assert_eq!(heads, Some(&json!(6)));
        let differing = config(json!({"rope_theta": [5e6, 1e4, 2e4]})).unwrap_err();
        assert!(differing.to_string().contains("rope_theta"), "{differing}");
    }
}
