//! Poolside's Laguna.

use serde_json::{Map, Value, json};

use super::gguf::joined;
use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill, list_layers, rename, routed};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (
            ".mlp.experts.e_score_correction_bias",
            ".mlp.gate.e_score_correction_bias",
        ),
        (".mlp.shared_expert.", ".mlp.shared_experts."),
        // mlx-lm's name.
        (".mlp.gate.proj.", ".mlp.gate."),
    ],
    gguf: Some(GgufFamily {
        heads_differ: true,
        read,
        overrides: routed::names!(("attn_gate", "self_attn.g_proj")),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("laguna")
    }),
    ..Family::new(
        "laguna",
        "LagunaForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies fields of the mixture of experts to their usual names, and fills in missing fields.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("num_experts", "n_routed_experts"),
            ("moe_routed_scaling_factor", "routed_scaling_factor"),
            ("moe_router_score_func", "scoring_func"),
            (
                "shared_expert_intermediate_size",
                "moe_shared_expert_intermediate_size",
            ),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 512,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 512,
        "first_k_dense_replace": 1, "norm_topk_prob": true, "n_group": 1, "topk_group": 1,
        "gating": true, "tie_word_embeddings": false,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5,
                "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }}),
    );
    list_layers(map, |_| "full_attention");
}

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let heads = header.by_layer("attention.head_count", (1, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let part = |key: &str| -> Result<f64> {
        let rotated = keys.uint(key, 1, header.head_dim)?;
        Ok(rotated.map_or(1.0, |n| n as f64 / header.head_dim as f64))
    };
    let base = keys.positive("rope.freq_base")?.unwrap_or(10_000.0);
    let sliding_base = keys.positive("rope.freq_base_swa")?.unwrap_or(base);
    let mut full = json!({
        "rope_type": "default",
        "rope_theta": base,
        "partial_rotary_factor": part("rope.dimension_count")?,
    });
    if keys.metadata.str(&keys.key("rope.scaling.type"))? == Some("yarn") {
        let factor = keys.positive("rope.scaling.factor")?;
        let factor =
            factor.ok_or_else(|| keys.metadata.missing(&keys.key("rope.scaling.factor")))?;
        let original = "rope.scaling.original_context_length";
        full["rope_type"] = json!("yarn");
        full["factor"] = json!(factor);
        full["original_max_position_embeddings"] =
            json!(keys.uint(original, 1, limits::POSITIONS)?);
        for (field, key) in [
            ("beta_fast", "rope.scaling.yarn_beta_fast"),
            ("beta_slow", "rope.scaling.yarn_beta_slow"),
            ("attention_factor", "rope.scaling.yarn_attn_factor"),
        ] {
            full[field] = json!(keys.positive(key)?);
        }
    }
    let own = json!({
        "layer_types": header.layer_types_full_first()?,
        "mlp_layer_types": header.mixtures(),
        "sliding_window": header.window()?,
        "gating": gating(header, &heads)?,
        "num_attention_heads_per_layer": heads,
        "rope_scaling": Value::Null,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": sliding_base,
                "partial_rotary_factor": part("rope.dimension_count_swa")?,
            },
        },
    });
    Ok(joined(
        routed::read(header, &routed::NORMALIZED_SIGMOIDS)?,
        own,
    ))
}

/// Whether each head or each element has a gate. The rows of the matrices show it.
fn gating(header: &GgufHeader<'_>, heads: &[usize]) -> Result<&'static str> {
    let rows = |layer: usize| {
        let name = format!("blk.{layer}.attn_gate.weight");
        header.file.tensors().get(&name)?.shape.first().copied()
    };
    let all = |width: usize| (0..).zip(heads).all(|(i, n)| rows(i) == Some(n * width));
    match (all(1), all(header.head_dim)) {
        (true, _) => Ok("per-head"),
        (_, true) => Ok("per-element"),
        _ => Err(crate::files::invalid(
            header.file.path(),
            "blk.N.attn_gate.weight must have a row for each head, or for each element of a head",
        )),
    }
}
