//! Arcee's mixtures of experts: Trinity.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".pre_mlp_layernorm.", ".pre_feedforward_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
        (".mlp.router.gate.", ".mlp.gate."),
        (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        // mlx-lm's names of stacked experts.
        (".mlp.experts.gate_proj.", ".mlp.switch_mlp.gate_proj."),
        (".mlp.experts.up_proj.", ".mlp.switch_mlp.up_proj."),
        (".mlp.experts.down_proj.", ".mlp.switch_mlp.down_proj."),
    ],
    pipeline: false,
    ..Family::new(
        "afmoe",
        "AfmoeForCausalLM",
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

/// In these files, the router's fields have other names than usual.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("global_attn_every_n_layers", "sliding_window_pattern"),
            ("num_dense_layers", "first_k_dense_replace"),
            ("num_experts", "n_routed_experts"),
            ("num_shared_experts", "n_shared_experts"),
            ("route_scale", "routed_scaling_factor"),
            ("route_norm", "norm_topk_prob"),
            ("score_func", "scoring_func"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "sliding_window": 1024, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, "norm_topk_prob": true, "n_group": 1, "topk_group": 1,
            "mup_enabled": false}),
    );
}
