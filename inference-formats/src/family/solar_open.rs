//! Solar Open.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true, "head_dim": 128}),
        );
    },
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "solar_open",
        "SolarOpenForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};
