//! SmolLM3.

use serde_json::json;

use super::gguf::add;
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    chat: Some(ChatFormat::ChatMl),
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        write: |config| add(config, json!({"no_rope_layer_interval": 4})),
        // Readers assume that every fourth layer has no positions.
        export: Some(GgufExport {
            assumed: &[("no_rope_layer_interval", 4)],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("smollm3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "smollm3",
        "SmolLM3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 2_000_000.0,
            windows: Windows::Never,
        },
    )
};
