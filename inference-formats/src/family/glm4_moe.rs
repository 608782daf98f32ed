//! GLM-4.5, 4.6 and 4.7.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill, routed};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"partial_rotary_factor": 0.5, "use_qk_norm": false, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": true, "head_dim": 128}),
        );
    },
    reply: Some("glm4_moe"),
    gguf: Some(GgufFamily {
        optional_biases: true,
        read: |header| routed::with_head_norms(header, &routed::NORMALIZED_SIGMOIDS),
        overrides: routed::names!(("post_attention_norm", "post_attention_layernorm")),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("glm4moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
