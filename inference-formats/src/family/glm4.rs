//! GLM-4.

use serde_json::json;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"partial_rotary_factor": 0.5})),
    reply: Some("glm4"),
    tensor_parallel: super::TensorParallel::Heads,
    gguf: Some(GgufFamily {
        optional_biases: true,
        overrides: &[
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
        ],
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("glm4")
    }),
    ..Family::new(
        "glm4",
        "Glm4ForCausalLM",
        Defaults {
            norm_eps: 1.5625e-7,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
