//! Helium.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 128, "tie_word_embeddings": false})),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "helium",
        "HeliumForCausalLM",
        Defaults {
            norm_eps: 1e-8,
            rope_theta: 100_000.0,
            windows: Windows::Never,
        },
    )
};
