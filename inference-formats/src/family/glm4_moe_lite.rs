//! GLM-4.7 Flash.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, deepseek_v3, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true, "q_lora_rank": 768,
            "first_k_dense_replace": 1}),
        );
    },
    reply: Some("glm4_moe"),
    latent: true,
    gguf: Some(GgufFamily {
        is_variant: true,
        // The tokenizer tells these files apart from those of DeepSeek.
        claims: Some((deepseek_v3::ARCHITECTURE, |header| {
            let scoring = deepseek_v3::scoring(header)?;
            let splits = header.keys.metadata.str("tokenizer.ggml.pre")?;
            Ok(scoring == Some("sigmoid") && splits == Some("glm4"))
        })),
        ..deepseek_v3::GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};
