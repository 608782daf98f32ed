//! Qwen 3.

use serde_json::json;

use super::gguf::{add, quotient};
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen3_vl"],
    chat: Some(ChatFormat::ChatMl),
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        // The text part of multimodal models. All coordinates of a text's positions are equal, so
        // the rotation is the usual one.
        also: &["qwen3vl"],
        optional_biases: true,
        // The default of transformers differs from this quotient.
        write: |config| add(config, json!({"head_dim": quotient(config)})),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("qwen3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen3",
        "Qwen3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::FromLayer,
        },
    )
};
