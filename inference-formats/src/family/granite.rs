//! Granite.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufExport, GgufFamily, GgufHeader, Windows};
use crate::error::Result;

/// Keys of GGUF files, each with its field of `config.json`: factors on scores, embeddings,
/// residuals and logits.
const FACTORS: [(&str, &str); 4] = [
    ("attention.scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
];

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        read: |header| factors(header).map(Value::Object),
        export: Some(GgufExport {
            factors: &FACTORS,
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("granite")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "granite",
        "GraniteForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the factors of a GGUF file.
pub(super) fn factors(header: &GgufHeader<'_>) -> Result<Map<String, Value>> {
    let mut fields = Map::new();
    for (key, field) in FACTORS {
        fields.insert(field.to_owned(), json!(header.keys.positive(key)?));
    }
    Ok(fields)
}
