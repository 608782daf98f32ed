//! Youtu-LLM.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, deepseek_v3, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"rope_traditional": true, "tie_word_embeddings": true}),
        );
    },
    latent: true,
    gguf: Some(GgufFamily {
        is_variant: true,
        claims: Some((deepseek_v3::ARCHITECTURE, |header| {
            Ok(header.experts()?.is_none())
        })),
        read: deepseek_v3::latent,
        ..deepseek_v3::GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "youtu_llm",
        "YoutuForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 1.6e6,
            windows: Windows::Never,
        },
    )
};
