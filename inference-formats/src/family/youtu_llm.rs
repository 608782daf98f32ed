//! Youtu-LLM.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"rope_traditional": true, "tie_word_embeddings": true}),
        );
    },
    latent: true,
    pipeline: false,
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
