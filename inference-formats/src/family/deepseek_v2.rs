//! DeepSeek V2.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"scoring_func": "softmax", "norm_topk_prob": false, "topk_method": "greedy"}),
        );
    },
    latent: true,
    pipeline: false,
    ..Family::new(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
