//! OLMo 1.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufExport, GgufFamily, GgufHeader, Windows};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        permuted: true,
        layer_norm: true,
        read,
        export: Some(GgufExport {
            floats: &[("attention.clamp_kqv", "clip_qkv")],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("olmo")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "olmo",
        "OlmoForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn read(header: &GgufHeader<'_>) -> Result<Value> {
    Ok(json!({"clip_qkv": header.keys.positive("attention.clamp_kqv")?}))
}
