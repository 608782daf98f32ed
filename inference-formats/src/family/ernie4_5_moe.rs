//! ERNIE 4.5 with mixtures of experts.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{Defaults, Family, GgufFamily, GgufHeader, Names, Windows, fill, rename, routed};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[(
        ".mlp.moe_statics.e_score_correction_bias",
        ".mlp.gate.e_score_correction_bias",
    )],
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["model.mtp_"],
    gguf: Some(GgufFamily {
        read,
        write: |config| publish(config, FIELDS),
        overrides: routed::names!(),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("ernie4_5-moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies the fields of the experts to their usual names, and fills in missing fields.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("moe_num_experts", "n_routed_experts"),
            ("moe_k", "num_experts_per_tok"),
            ("moe_num_shared_experts", "n_shared_experts"),
            ("moe_layer_start_index", "first_k_dense_replace"),
            ("moe_gate_act", "scoring_func"),
        ],
    );
    fill(
        map,
        json!({"scoring_func": "softmax", "norm_topk_prob": true, "tie_word_embeddings": true}),
    );
}

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = routed::read(header, &routed::NORMALIZED_SOFTMAX)?;
    fields["use_bias"] = json!(header.has_query_biases());
    fields["moe_layer_interval"] = json!(
        header
            .keys
            .uint("interleave_moe_layer_step", 0, limits::LAYERS)?
            .map(|n| n.max(1))
    );
    Ok(fields)
}

/// Usual names of fields, each with the name in the family's own files.
const FIELDS: Names = &[
    ("n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k"),
    ("n_shared_experts", "moe_num_shared_experts"),
    ("first_k_dense_replace", "moe_layer_start_index"),
    ("scoring_func", "moe_gate_act"),
];
