//! Phi-3 and Phi-4-mini.

use serde_json::json;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"original_max_position_embeddings": 4096})),
    gguf: Some(GgufFamily {
        read: |header| Ok(json!({"sliding_window": header.window()?})),
        export: Some(GgufExport {
            numbers: &[("attention.sliding_window", "sliding_window")],
            ..GgufExport::PLAIN
        }),
        overrides: &[("ffn_up", "mlp.gate_up_proj")],
        ..GgufFamily::new("phi3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "phi3",
        "Phi3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::All,
        },
    )
};
