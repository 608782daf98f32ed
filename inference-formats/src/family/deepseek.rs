//! DeepSeek MoE.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill, routed};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"scoring_func": "softmax", "norm_topk_prob": false}),
        );
    },
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        read: |header| routed::read(header, &routed::SOFTMAX),
        overrides: routed::names!(),
        ..GgufFamily::new("deepseek")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "deepseek",
        "DeepseekForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
