//! Granite.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows};

/// The descriptor.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        read: |header| {
            let factor = |name: &str| header.keys.positive(name);
            Ok(json!({
                "attention_multiplier": factor("attention.scale")?,
                "embedding_multiplier": factor("embedding_scale")?,
                "residual_multiplier": factor("residual_scale")?,
                "logits_scaling": factor("logit_scale")?,
            }))
        },
        ..GgufFamily::new("granite")
    }),
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
