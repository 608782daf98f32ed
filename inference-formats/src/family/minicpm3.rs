//! MiniCPM 3.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    latent: true,
    pipeline: false,
    ..Family::new(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};

/// The width of a value head is the hidden size divided by the number of heads.
fn complete(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_u64);
    let heads = number("num_attention_heads").filter(|heads| *heads > 0);
    if let (Some(hidden), Some(heads)) = (number("hidden_size"), heads) {
        fill(map, json!({"v_head_dim": hidden / heads}));
    }
}
