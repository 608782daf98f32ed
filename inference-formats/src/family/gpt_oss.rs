//! gpt-oss.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 64, "sliding_window": 128})),
    reply: Some("harmony"),
    ..Family::new(
        "gpt_oss",
        "GptOssForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 150_000.0,
            windows: Windows::AllBut {
                every: 2,
                last_is_full: false,
            },
        },
    )
};
