//! ModernBERT.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill, is_set, list_layers, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    encoder: true,
    pipeline: false,
    complete,
    ..Family::new(
        "modernbert",
        "ModernBertModel",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 160_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies fields to their usual names, and lists which layers attend to all positions: by default
/// the first layer, and every third layer after it.
fn complete(map: &mut Map<String, Value>) {
    for (name, usual) in [
        ("norm_eps", "rms_norm_eps"),
        ("global_rope_theta", "rope_theta"),
    ] {
        if let Some(value) = map.get(name).filter(|v| !v.is_null()).cloned() {
            map.insert(usual.to_owned(), value);
        }
    }
    rename(map, &[("local_rope_theta", "rope_local_base_freq")]);
    fill(
        map,
        json!({"local_attention": 128, "rope_local_base_freq": 10_000.0}),
    );
    let every = match map
        .get("global_attn_every_n_layers")
        .and_then(Value::as_u64)
    {
        Some(n) if n > 0 => n as usize,
        _ => 3,
    };
    if !is_set(map, "layer_types") {
        list_layers(map, |i| match i % every {
            0 => "full_attention",
            _ => "sliding_attention",
        });
    }
    // `local_attention` counts the positions on both sides of a query. The engine halves it.
    if let Some(window) = map.get("local_attention").cloned() {
        map.insert("sliding_window".to_owned(), window);
    }
}
