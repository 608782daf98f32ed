//! LFM2.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set, list_layers, rename};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("lfm2"),
    ..Family::new("lfm2", "Lfm2ForCausalLM", DEFAULTS)
};

/// What both families of LFM2 leave out.
pub(super) const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-5,
    rope_theta: 1e6,
    windows: Windows::Never,
};

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"block_auto_adjust_ff_dim": true, "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0}),
    );
    if is_set(map, "block_ff_dim") {
        let width = map.remove("block_ff_dim");
        map.insert("intermediate_size".into(), width.unwrap_or_default());
    }
    if map.get("block_auto_adjust_ff_dim") == Some(&json!(true)) {
        adjust_width(map);
    }
    shared(map);
}

/// What both families of LFM2 have.
pub(super) fn shared(map: &mut Map<String, Value>) {
    if let Some(eps) = map.get("norm_eps").filter(|v| !v.is_null()).cloned() {
        map.insert("rms_norm_eps".into(), eps);
    }
    rename(map, &[("tie_embedding", "tie_word_embeddings")]);
    fill(
        map,
        json!({"tie_word_embeddings": true, "conv_L_cache": 3, "conv_bias": false}),
    );
    let attention: Option<Vec<u64>> = (map.get("full_attn_idxs"))
        .and_then(Value::as_array)
        .map(|all| all.iter().filter_map(Value::as_u64).collect());
    list_layers(map, |i| match &attention {
        Some(attention) if !attention.contains(&(i as u64)) => "conv",
        _ => "full_attention",
    });
}

/// Two thirds of the width, times a factor, rounded up to a multiple. It is done once: a
/// configuration that is read again has the result.
fn adjust_width(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let multiple = number("block_multiple_of");
    let width = (2.0 * number("intermediate_size") / 3.0).trunc();
    let width = (number("block_ffn_dim_multiplier") * width).trunc();
    let width = ((width + multiple - 1.0) / multiple).floor() * multiple;
    // What is no number becomes a null, which is refused as a missing width.
    map.insert("intermediate_size".into(), json!(width));
    map.insert("block_auto_adjust_ff_dim".into(), json!(false));
}
