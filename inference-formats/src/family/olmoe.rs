//! OLMoE.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"norm_topk_prob": false, "num_experts_per_tok": 8, "num_experts": 64}),
        );
    },
    ..Family::new(
        "olmoe",
        "OlmoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
