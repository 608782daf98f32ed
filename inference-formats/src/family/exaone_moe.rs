//! K-EXAONE.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{Defaults, Family, GgufFamily, GgufHeader, Names, Windows, fill, rename, routed};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    reply: Some("hermes"),
    names: &[(
        ".mlp.e_score_correction_bias",
        ".mlp.gate.e_score_correction_bias",
    )],
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["mtp."],
    gguf: Some(GgufFamily {
        read,
        write: |config| {
            const NAMES: Names = &[
                ("n_routed_experts", "num_experts"),
                ("n_shared_experts", "num_shared_experts"),
            ];
            publish(config, NAMES);
        },
        overrides: routed::names!(),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("exaone-moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = routed::read(header, &routed::NORMALIZED_SIGMOIDS)?;
    let window = header.window()?;
    fields["sliding_window"] = json!(window);
    fields["layer_types"] = match window {
        Some(_) => json!(header.layer_types()?),
        None => json!(vec!["full_attention"; header.layers]),
    };
    Ok(fields)
}

fn complete(map: &mut Map<String, Value>) {
    // A null means no window, so only a missing field gets the default.
    map.entry("sliding_window").or_insert(json!(4096));
    rename(
        map,
        &[
            ("num_experts", "n_routed_experts"),
            ("num_shared_experts", "n_shared_experts"),
        ],
    );
    fill(
        map,
        json!({"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "norm_topk_prob": true,
            "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}),
    );
}
