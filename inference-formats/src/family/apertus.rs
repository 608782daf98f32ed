//! Apertus.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, is_set};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".attention_layernorm.", ".input_layernorm."),
        (".feedforward_layernorm.", ".post_attention_layernorm."),
    ],
    gguf: Some(GgufFamily {
        activation: "xielu",
        // In directories, the activation's factors are tensors, so a GGUF file cannot be converted.
        runs_only: true,
        read,
        ..GgufFamily::new("apertus")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "apertus",
        "ApertusForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 12e6,
            windows: Windows::Never,
        },
    )
};

/// Reads the factors of the activation, one number per layer.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = Map::new();
    for (key, field) in [
        ("xielu.alpha_p", "xielu_alpha_p"),
        ("xielu.alpha_n", "xielu_alpha_n"),
        ("xielu.beta", "xielu_beta"),
        ("xielu.eps", "xielu_eps"),
    ] {
        let metadata = header.keys.metadata;
        let values = metadata.f32s(key)?.ok_or_else(|| metadata.missing(key))?;
        fields.insert(field.into(), json!(values));
    }
    Ok(Value::Object(fields))
}

/// Sets the reference implementation's scaling of positions if the file contains none.
fn complete(map: &mut Map<String, Value>) {
    if !is_set(map, "rope_parameters") && !map.contains_key("rope_scaling") {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        map.insert("rope_scaling".into(), scaling);
    }
}
