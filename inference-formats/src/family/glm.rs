//! GLM-4 of 2024, whose blocks have two norms.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"partial_rotary_factor": 0.5})),
    gguf: Some(GgufFamily {
        optional_biases: true,
        // Files of ChatGLM have one matrix for queries, keys and values.
        read: |header| Ok(json!({"attention_bias": header.has_query_biases()})),
        overrides: &[("ffn_up", "mlp.gate_up_proj")],
        ..GgufFamily::new("chatglm")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "glm",
        "GlmForCausalLM",
        Defaults {
            norm_eps: 1.5625e-7,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
