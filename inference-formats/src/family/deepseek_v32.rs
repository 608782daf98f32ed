//! DeepSeek V3.2.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true,
                "first_k_dense_replace": 3, "index_topk": 2048, "index_head_dim": 128,
                "index_n_heads": 64}),
        );
    },
    reply: Some("deepseek_v31"),
    latent: true,
    pipeline: false,
    ..Family::new(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
