//! LFM2.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Names, Recurrence, Windows, fill, is_set,
    list_layers, rename,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("lfm2"),
    gguf: Some(GgufFamily {
        layers_differ: true,
        read: |header| {
            let mut fields = convolutions(header)?;
            // The width in a GGUF file is final, so the adjustment is disabled.
            fields["block_auto_adjust_ff_dim"] = json!(false);
            Ok(fields)
        },
        overrides: NAMES,
        global: GLOBAL,
        ..GgufFamily::new("lfm2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new("lfm2", "Lfm2ForCausalLM", DEFAULTS)
};

/// Values that the configurations of both LFM2 families omit.
pub(super) const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-5,
    rope_theta: 1e6,
    windows: Windows::Never,
};

/// Names inside the blocks of GGUF files, including those of experts.
pub(super) const NAMES: Names = &[
    ("attn_norm", "operator_norm"),
    ("ffn_norm", "ffn_norm"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("attn_output", "self_attn.out_proj"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.out_proj", "conv.out_proj"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_up", "feed_forward.w3"),
    ("ffn_down", "feed_forward.w2"),
    ("ffn_gate_inp", "feed_forward.gate"),
    ("ffn_gate_exps", "feed_forward.switch_mlp.gate_proj"),
    ("ffn_up_exps", "feed_forward.switch_mlp.up_proj"),
    ("ffn_down_exps", "feed_forward.switch_mlp.down_proj"),
    ("ffn_gate_up_exps", "feed_forward.switch_mlp.gate_up_proj"),
];

/// Names outside of blocks.
pub(super) const GLOBAL: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("token_embd_norm", "model.embedding_norm"),
    ("output", "lm_head"),
];

/// The kinds of layers in a GGUF file: a layer without key heads is a convolution layer.
pub(super) fn convolutions(header: &GgufHeader<'_>) -> Result<Value> {
    let heads = header.by_layer("attention.head_count_kv", (0, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let most = heads.iter().copied().max().unwrap_or_default();
    if let Some((layer, n)) = (0..).zip(&heads).find(|(_, n)| ![0, most].contains(*n)) {
        let message = format!(
            "is {n} in layer {layer} and {most} in others; it must be the same in all, or 0"
        );
        return Err(header.keys.unsupported("attention.head_count_kv", message));
    }
    let kind = |n: &usize| match n {
        0 => "conv",
        _ => "full_attention",
    };
    Ok(json!({
        "layer_types": heads.iter().map(kind).collect::<Vec<_>>(),
        "conv_L_cache": header.keys.required("shortconv.l_cache", limits::HIDDEN)?,
        "conv_bias": false,
    }))
}

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

/// Completes the fields of both LFM2 families.
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

/// Sets the feed-forward width to two thirds of itself, times a factor, rounded up to a multiple.
/// This must happen only once, because a configuration that is read again already contains the
/// result.
fn adjust_width(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let multiple = number("block_multiple_of");
    let width = (2.0 * number("intermediate_size") / 3.0).trunc();
    let width = (number("block_ffn_dim_multiplier") * width).trunc();
    let width = ((width + multiple - 1.0) / multiple).floor() * multiple;
    // NaN becomes null, which is later rejected as a missing width.
    map.insert("intermediate_size".into(), json!(width));
    map.insert("block_auto_adjust_ff_dim".into(), json!(false));
}
