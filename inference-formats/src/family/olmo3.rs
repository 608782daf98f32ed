//! OLMo 3.

use serde_json::{Map, Value, json};

use super::gguf::SANDWICH;
use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill, is_set};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    reply: Some("olmo3"),
    gguf: Some(GgufFamily {
        is_variant: true,
        optional_biases: true,
        overrides: SANDWICH,
        ..GgufFamily::new("olmo2")
    }),
    tensor_parallel: super::TensorParallel::HeadsAndNorms,
    ..Family::new(
        "olmo3",
        "Olmo3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};

/// Fills in the window and the rotary base of layers with a window. This base equals the base of
/// the other layers, but is not scaled.
fn complete(map: &mut Map<String, Value>) {
    fill(map, json!({"sliding_window": 4096}));
    if !is_set(map, "rope_local_base_freq") {
        let nested = map.get("rope_parameters").and_then(|p| p.get("rope_theta"));
        if let Some(base) = nested.or(map.get("rope_theta")).cloned() {
            map.insert("rope_local_base_freq".into(), base);
        }
    }
}

/// Reads the fields of a file that has OLMo 2's architecture and a window.
pub(super) fn read(header: &GgufHeader<'_>, window: usize) -> Result<Value> {
    Ok(json!({
        "model_type": FAMILY.model_type,
        "sliding_window": window,
        "layer_types": header.layer_types()?,
        "rope_local_base_freq": header.keys.positive("rope.freq_base_swa")?,
    }))
}
