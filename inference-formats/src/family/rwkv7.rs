//! RWKV-7, in the layout of flash-linear-attention.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    pipeline: false,
    ..Family::new(
        "rwkv7",
        "RWKV7ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// The number of heads and the width of channel mixing follow from the hidden size.
fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"head_dim": 64, "hidden_ratio": 4.0, "tie_word_embeddings": false}),
    );
    let number = |name: &str| map.get(name).and_then(Value::as_f64);
    let (hidden, head) = (number("hidden_size"), number("head_dim"));
    let ratio = number("hidden_ratio");
    if let (Some(hidden), Some(head)) = (hidden, head)
        && head >= 1.0
    {
        // A head size that does not divide the hidden size is rejected later.
        let heads = (hidden / head).ceil();
        map.insert("num_attention_heads".into(), json!(heads));
        map.insert("num_key_value_heads".into(), json!(heads));
    }
    if let (Some(hidden), Some(ratio)) = (hidden, ratio)
        && !is_set(map, "intermediate_size")
    {
        // Widths are multiples of 32.
        let width = (hidden * ratio / 32.0).ceil() * 32.0;
        map.insert("intermediate_size".into(), json!(width));
    }
}
