//! Seed-OSS.

use serde_json::json;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 128, "attention_bias": true})),
    reply: Some("qwen3_coder"),
    gguf: Some(GgufFamily {
        optional_biases: true,
        read: |header| Ok(json!({"attention_out_bias": header.has("attn_output.bias")})),
        overrides: &[("post_attention_norm", "post_attention_layernorm")],
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("seed_oss")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "seed_oss",
        "SeedOssForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
