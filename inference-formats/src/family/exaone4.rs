//! EXAONE 4.

use serde_json::{Map, Value, json};

use super::gguf::{SANDWICH, add, quotient};
use super::{Defaults, Family, GgufFamily, GgufHeader, Windows};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    // A null means no window, so only a missing field gets the default.
    complete: |map| {
        map.entry("sliding_window").or_insert(json!(4096));
    },
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        read,
        write,
        overrides: SANDWICH,
        ..GgufFamily::new("exaone4")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "exaone4",
        "Exaone4ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};

fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let window = header.window()?;
    let kinds = match window {
        Some(_) => header.layer_types()?,
        None => vec!["full_attention"; header.layers],
    };
    Ok(json!({"sliding_window": window, "layer_types": kinds}))
}

/// mlx-lm requires all of these fields, and ignores `layer_types`.
fn write(config: &mut Map<String, Value>) {
    let fields = json!({"head_dim": quotient(config), "rope_scaling": null,
        "sliding_window": null, "sliding_window_pattern": letters(config)});
    add(config, fields);
}

/// The layer kinds as letters: `L` means sliding, `G` means full. `None` without a window.
fn letters(config: &Map<String, Value>) -> Option<String> {
    config.get("sliding_window")?.as_u64()?;
    let kinds = config.get("layer_types")?.as_array()?;
    let letter = |kind: &Value| {
        if kind == "sliding_attention" {
            'L'
        } else {
            'G'
        }
    };
    Some(kinds.iter().map(letter).collect())
}
