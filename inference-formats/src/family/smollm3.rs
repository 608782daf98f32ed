//! SmolLM3.

use serde_json::{Map, Value, json};

use super::gguf::add;
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows, fill};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    chat: Some(ChatFormat::ChatMl),
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        // Readers assume that every fourth layer has no rotation.
        write: |config| add(config, json!({"no_rope_layer_interval": 4})),
        export: Some(GgufExport::PLAIN),
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

/// Lists which layers rotate (1) and which do not (0). The engine refuses a wrong interval.
fn complete(map: &mut Map<String, Value>) {
    let set = |name: &str| map.get(name).filter(|value| !value.is_null());
    let interval = set("no_rope_layer_interval").map_or(Some(4), Value::as_u64);
    let layers = set("num_hidden_layers").and_then(Value::as_u64);
    let (Some(interval), Some(layers)) = (interval.filter(|n| *n > 0), layers) else {
        return;
    };
    let layers = layers.min(limits::LAYERS as u64);
    let rotates = |layer: u64| u64::from(!layer.is_multiple_of(interval));
    let listed: Vec<u64> = (1..=layers).map(rotates).collect();
    fill(map, json!({"no_rope_layers": listed}));
}
