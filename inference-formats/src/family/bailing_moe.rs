//! Ling and Ring.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill, rename, routed};
use crate::error::Result;

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
    gguf: Some(GgufFamily {
        also: &["bailingmoe2"],
        // In the second version, one matrix computes queries, keys and values in the usual order.
        permuted: true,
        optional_biases: true,
        // Files of the first version have three matrices where directories have one.
        runs_only: true,
        read,
        overrides: routed::names!(),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("bailingmoe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
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

/// Copies fields of attention and experts to their usual names, and fills in missing fields.
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

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = routed::with_head_norms(header, &routed::NORMALIZED_SOFTMAX)?;
    fields["use_bias"] = json!(header.has("attn_output.bias"));
    Ok(fields)
}
