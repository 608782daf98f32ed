//! Poolside's Laguna.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, list_layers, rename};

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
    pipeline: false,
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

/// In these files, the router's fields have other names than usual.
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
