//! Mellum 2.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"norm_topk_prob": true})),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "mellum",
        "MellumForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
