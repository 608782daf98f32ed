//! Hunyuan, dense.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".self_attn.query_layernorm.", ".self_attn.q_norm."),
        (".self_attn.key_layernorm.", ".self_attn.k_norm."),
    ],
    gguf: Some(GgufFamily {
        optional_biases: true,
        read: |header| Ok(json!({"use_qk_norm": header.has("attn_q_norm.weight")})),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("hunyuan-dense")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// `rope_scaling` contains a factor for the base. The factor is raised to a power that depends on
/// the head's width. In files of transformers 5 it is in `rope_parameters`, beside the base.
pub(super) fn complete(map: &mut Map<String, Value>) {
    fill(map, json!({"use_qk_norm": true}));
    let nested = |map: &Map<String, Value>, field: &str, name: &str| {
        let value = map.get(field).and_then(|scaling| scaling.get(name));
        value.and_then(Value::as_f64)
    };
    if nested(map, "rope_parameters", "alpha").is_some()
        && let Some(scaling) = map.remove("rope_parameters")
    {
        if let Some(base) = scaling.get("rope_theta").filter(|base| !base.is_null()) {
            map.insert("rope_theta".into(), base.clone());
        }
        map.insert("rope_scaling".into(), scaling);
    }
    let alpha = nested(map, "rope_scaling", "alpha");
    let number = |name: &str| map.get(name).and_then(Value::as_f64);
    let head_dim = number("head_dim")
        .or_else(|| Some(number("hidden_size")? / number("num_attention_heads")?));
    if let (Some(alpha), Some(dim), Some(base)) = (alpha, head_dim, number("rope_theta"))
        && dim > 2.0
    {
        // The factor must be applied only once, because a configuration that is read again already
        // contains the result.
        map.insert(
            "rope_theta".into(),
            json!(base * alpha.powf(dim / (dim - 2.0))),
        );
        map.remove("rope_scaling");
    }
}
