//! Ling and Ring.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    // The names of tensors in mixtures and attention.
    names: &[
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.query_key_value.", ".self_attn.qkv_proj."),
        (".attention.dense.", ".self_attn.o_proj."),
        (".attention.query_layernorm.", ".self_attn.q_norm."),
        (".attention.key_layernorm.", ".self_attn.k_norm."),
        (".mlp.gate.gate_proj.", ".mlp.gate."),
        (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ],
    pipeline: false,
    ..Family::new(
        "bailing_moe",
        "BailingMoeForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// In these files, the router's fields have other names than usual.
fn complete(map: &mut Map<String, Value>) {
    super::rotated_elements(map);
    rename(
        map,
        &[
            ("num_experts", "n_routed_experts"),
            ("num_shared_experts", "n_shared_experts"),
            ("score_function", "scoring_func"),
            ("use_qkv_bias", "attention_bias"),
        ],
    );
    fill(
        map,
        json!({"scoring_func": "softmax", "norm_topk_prob": true, "n_group": 1,
            "tie_word_embeddings": false}),
    );
}
