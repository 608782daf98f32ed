//! GLM-5.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true, "q_lora_rank": 2048,
                "first_k_dense_replace": 3, "index_topk": 2048, "index_head_dim": 128,
                "index_n_heads": 32}),
        );
    },
    reply: Some("glm4_moe"),
    latent: true,
    pipeline: false,
    ..Family::new(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
