//! MiniMax M2.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{Defaults, Family, GgufFamily, Windows, fill, rename, routed};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    reply: Some("minimax"),
    aliases: &["minimax_m2"],
    names: &[
        (
            ".block_sparse_moe.e_score_correction_bias",
            ".mlp.gate.e_score_correction_bias",
        ),
        (".block_sparse_moe.", ".mlp."),
    ],
    gguf: Some(GgufFamily {
        read: |header| routed::with_head_norms(header, &routed::NORMALIZED_SIGMOIDS),
        write: |config| {
            config.remove("intermediate_size");
            publish(
                config,
                &[
                    ("n_routed_experts", "num_local_experts"),
                    ("moe_intermediate_size", "intermediate_size"),
                ],
            );
        },
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("minimax-m2")
    }),
    tensor_parallel: super::TensorParallel::HeadsAndNorms,
    ..Family::new(
        "minimax",
        "MiniMaxForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 5e6,
            windows: Windows::Never,
        },
    )
};

/// Copies fields to their usual names, and fills in missing fields. In these files, `rotary_dim` is
/// the number of rotated elements of a head, and `intermediate_size` is the width of an expert.
fn complete(map: &mut Map<String, Value>) {
    super::rotated_elements(map);
    rename(
        map,
        &[
            ("num_local_experts", "n_routed_experts"),
            ("intermediate_size", "moe_intermediate_size"),
        ],
    );
    fill(map, json!({"norm_topk_prob": true, "use_qk_norm": true}));
}
