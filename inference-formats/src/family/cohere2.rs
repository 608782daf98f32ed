//! Cohere's Command R7B.

use serde_json::json;

use super::cohere::files;
use super::{Defaults, Family, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"logit_scale": 0.0625, "sliding_window": 4096})),
    reply: Some("command_r"),
    tensor_parallel: super::TensorParallel::Heads,
    gguf: Some(GgufFamily {
        read: |header| {
            Ok(json!({
                "logit_scale": header.keys.positive("logit_scale")?,
                "sliding_window": header.window()?,
                "layer_types": header.layer_types()?,
            }))
        },
        ..files("cohere2")
    }),
    ..Family::new(
        "cohere2",
        "Cohere2ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};
