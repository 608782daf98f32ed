//! Cohere's Command R.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"logit_scale": 0.0625, "tie_word_embeddings": true}),
        );
    },
    reply: Some("command_r"),
    ..Family::new(
        "cohere",
        "CohereForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::Never,
        },
    )
};
