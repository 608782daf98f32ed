//! Ministral 3, and the text part of Mistral Small 3 and Devstral.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["mistral3"],
    gguf: Some(GgufFamily {
        permuted: true,
        read,
        ..GgufFamily::new("mistral3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "ministral3",
        "Ministral3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. Only Ministral 3 has `YaRN`, and queries that grow with the
/// logarithm of their position.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    if keys.metadata.str(&keys.key("rope.scaling.type"))? != Some("yarn") {
        return Ok(Value::Null);
    }
    let factor = keys.positive("rope.scaling.factor")?;
    let factor = factor.ok_or_else(|| keys.metadata.missing(&keys.key("rope.scaling.factor")))?;
    // The published models have equal values for both, so the factor on queries and keys is 1.
    let weight = keys.positive("rope.scaling.yarn_log_multiplier")?;
    Ok(json!({
        "rope_scaling": null,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": keys.positive("rope.freq_base")?,
            "factor": factor,
            "original_max_position_embeddings": keys.required(
                "rope.scaling.original_context_length",
                limits::POSITIONS,
            )?,
            "beta_fast": keys.positive("rope.scaling.yarn_beta_fast")?,
            "beta_slow": keys.positive("rope.scaling.yarn_beta_slow")?,
            "mscale": weight,
            "mscale_all_dim": weight,
            "llama_4_scaling_beta": keys.positive("attention.temperature_scale")?,
        },
    }))
}
