//! DeepSeek V3 and R1, and Kimi K2.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true}),
        );
    },
    reply: Some("deepseek_v3"),
    aliases: &["kimi_k2", "joyai_llm_flash"],
    multimodal: &["kimi_vl"],
    latent: true,
    pipeline: false,
    ..Family::new(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
