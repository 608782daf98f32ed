//! ERNIE 4.5.

use serde_json::json;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 128, "tie_word_embeddings": true})),
    gguf: Some(GgufFamily {
        read: |header| Ok(json!({"use_bias": header.has_query_biases()})),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("ernie4_5")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::Never,
        },
    )
};
