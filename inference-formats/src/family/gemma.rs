//! Gemma.

use serde_json::json;

use super::gguf::{TANH_GELU, add, quotient};
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 256})),
    chat: Some(ChatFormat::Gemma),
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        norm_plus_one: true,
        // transformers has another default for `head_dim`, so this quotient is written.
        write: |config| add(config, json!({"head_dim": quotient(config)})),
        // Old configurations name the exact GELU.
        export: Some(GgufExport {
            activations: &["gelu"],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("gemma")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gemma",
        "GemmaForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
