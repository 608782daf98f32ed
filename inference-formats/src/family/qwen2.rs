//! Qwen 2 and 2.5.

use serde_json::json;

use super::gguf::add;
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen2_vl", "qwen2_5_vl"],
    chat: Some(ChatFormat::ChatMl),
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        // The text part of multimodal models. All coordinates of a text's positions are equal, so
        // the rotation is the usual one.
        also: &["qwen2vl"],
        write: |config| add(config, json!({"use_sliding_window": false})),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("qwen2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen2",
        "Qwen2ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::FromLayer,
        },
    )
};
