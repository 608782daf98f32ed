//! DBRX.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill, is_set, rename};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    names: &[
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.blocks.", "model.layers."),
        ("transformer.norm_f.", "model.norm."),
        (".norm_attn_norm.norm_1.", ".input_layernorm."),
        (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
        (".norm_attn_norm.attn.Wqkv.", ".self_attn.qkv_proj."),
        (".norm_attn_norm.attn.out_proj.", ".self_attn.o_proj."),
        (".ffn.router.layer.", ".mlp.gate."),
        (".ffn.experts.", ".mlp.experts."),
    ],
    gguf: Some(GgufFamily {
        layer_norm: true,
        read,
        overrides: &[("attn_output_norm", "post_attention_layernorm")],
        ..GgufFamily::new("dbrx")
    }),
    joined_experts: super::JoinedExperts::Rows {
        at: ".experts.mlp",
        parts: ["w1", "v1", "w2"],
        prefix: ".experts",
    },
    ..Family::new(
        "dbrx",
        "DbrxForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. Readers of these files always normalize the router's weights.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let experts = header.experts()?;
    Ok(json!({
        "num_experts": experts.ok_or_else(|| keys.metadata.missing(&keys.key("expert_count")))?,
        "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        "clip_qkv": keys.positive("attention.clamp_kqv")?,
        "moe_normalize_expert_weights": 1.0,
    }))
}

/// The fields of attention and experts are in nested objects.
fn prepare(map: &mut Map<String, Value>) {
    let parts = [
        ("attn_config", "kv_n_heads", "num_key_value_heads"),
        ("attn_config", "clip_qkv", "clip_qkv"),
        ("attn_config", "rope_theta", "rope_theta"),
        ("ffn_config", "ffn_hidden_size", "intermediate_size"),
        ("ffn_config", "moe_num_experts", "num_experts"),
        ("ffn_config", "moe_top_k", "num_experts_per_tok"),
        (
            "ffn_config",
            "moe_normalize_expert_weights",
            "moe_normalize_expert_weights",
        ),
    ];
    for (part, from, to) in parts {
        let value = map.get(part).and_then(|part| part.get(from)).cloned();
        if let Some(value) = value.filter(|_| !is_set(map, to)) {
            map.insert(to.into(), value);
        }
    }
    let activation = map
        .get("ffn_config")
        .and_then(|part| part.get("ffn_act_fn"));
    if let Some(name) = activation.and_then(|act| act.get("name")).cloned() {
        map.insert("hidden_act".into(), name);
    }
    rename(
        map,
        &[
            ("d_model", "hidden_size"),
            ("n_heads", "num_attention_heads"),
            ("n_layers", "num_hidden_layers"),
            ("max_seq_len", "max_position_embeddings"),
        ],
    );
    fill(
        map,
        json!({"num_key_value_heads": 1, "intermediate_size": 3584, "num_experts": 4,
            "num_experts_per_tok": 1, "tie_word_embeddings": false}),
    );
    // A null means that the router's weights are not normalized, so only a missing field gets the
    // default.
    map.entry("moe_normalize_expert_weights")
        .or_insert(json!(1.0));
}
