//! MiniCPM.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        permuted: true,
        read,
        ..GgufFamily::new("minicpm")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "minicpm",
        "MiniCPMForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. It contains factors that are computed from the fields of a
/// `config.json`. A file without factors is an old file of MiniCPM 2B.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let layers = (header.layers as f32).sqrt();
    let depth = keys.positive("residual_scale")?;
    let logits = keys.positive("logit_scale")?;
    Ok(json!({
        "scale_emb": keys.positive("embedding_scale")?.unwrap_or(12.0),
        "scale_depth": depth.map_or(1.4, |scale| scale * layers),
        "dim_model_base": logits.map_or(256.0, |scale| header.hidden as f32 / scale),
    }))
}
