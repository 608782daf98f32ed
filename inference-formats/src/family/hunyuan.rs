//! Hunyuan with mixtures of experts.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Windows, fill, hunyuan_v1_dense, rename, routed,
};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    aliases: &["hunyuan_v1_moe"],
    names: &[
        (".self_attn.query_layernorm.", ".self_attn.q_norm."),
        (".self_attn.key_layernorm.", ".self_attn.k_norm."),
        (".mlp.gate.wg.", ".mlp.gate."),
        (".mlp.shared_mlp.", ".mlp.shared_experts."),
    ],
    gguf: Some(GgufFamily {
        optional_biases: true,
        read,
        write,
        overrides: routed::names!(),
        ..GgufFamily::new("hunyuan-moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "hunyuan",
        "HunYuanMoEV1ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies fields to their usual names, and fills in missing fields. A list with an equal number for
/// each layer is replaced by this number.
fn complete(map: &mut Map<String, Value>) {
    for name in [
        "num_experts",
        "moe_topk",
        "moe_intermediate_size",
        "num_shared_expert",
    ] {
        // A list with different numbers stays a list. A later check rejects it, because it is not a
        // number.
        if let Some(Value::Array(each)) = map.get(name)
            && let Some(first) = each.first().filter(|one| each.iter().all(|n| n == *one))
        {
            let first = first.clone();
            map.insert(name.into(), first);
        }
    }
    rename(
        map,
        &[
            ("attention_head_dim", "head_dim"),
            ("moe_layer_num_skipped", "first_k_dense_replace"),
            ("moe_topk", "num_experts_per_tok"),
            ("intermediate_size", "moe_intermediate_size"),
            ("intermediate_size", "moe_shared_expert_intermediate_size"),
        ],
    );
    fill(
        map,
        json!({"use_mixed_mlp_moe": true, "num_shared_expert": 1}),
    );
    let shared = match map.get("use_mixed_mlp_moe") {
        Some(Value::Bool(false)) => json!(0),
        _ => map.get("num_shared_expert").cloned().unwrap_or(json!(1)),
    };
    map.insert("n_shared_experts".into(), shared);
    fill(
        map,
        json!({"scoring_func": "softmax", "norm_topk_prob": true, "num_experts_per_tok": 1,
            "n_group": 1, "topk_group": 1}),
    );
    hunyuan_v1_dense::complete(map);
}

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = routed::with_head_norms(header, &routed::NORMALIZED_SOFTMAX)?;
    if let Value::Object(map) = &mut fields
        && let Some(experts) = map.remove("n_routed_experts")
    {
        map.insert("num_experts".into(), experts);
    }
    fields["num_shared_expert"] = fields["n_shared_experts"].clone();
    fields["use_mixed_mlp_moe"] = json!(fields["n_shared_experts"] != json!(0));
    Ok(fields)
}

/// Adds the family's own names of fields.
fn write(config: &mut Map<String, Value>) {
    publish(config, &[("num_experts_per_tok", "moe_topk")]);
}
