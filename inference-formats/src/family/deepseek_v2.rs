//! DeepSeek V2.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, deepseek_v3, fill};

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
    gguf: Some(GgufFamily {
        is_variant: true,
        ..deepseek_v3::GGUF
    }),
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
