//! RWKV-7, in the layout of flash-linear-attention.

use serde_json::{Map, Value, json};

use super::gguf::GgufChange;
use super::{Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, is_set};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    gguf: Some(GgufFamily {
        layer_norm: true,
        activation: "sqrelu",
        write,
        changes: &[
            // GGUF files have one tensor for the token-shift factors of all inputs.
            (
                ".attn.x_all",
                GgufChange::Entries(&[
                    ".attn.x_r",
                    ".attn.x_w",
                    ".attn.x_k",
                    ".attn.x_v",
                    ".attn.x_a",
                    ".attn.x_g",
                ]),
            ),
            (".attn.r_k", GgufChange::Rows("head_dim")),
            // All blocks of a GGUF file have the same tensors, but the first block does not use
            // these.
            ("layers.0.attn.v_lora.", GgufChange::Absent),
        ],
        // GGUF files contain 0 as the number of heads, so other keys are read.
        sizes: (HEAD_SIZE, "feed_forward_length"),
        read,
        overrides: &[
            ("attn_norm", "attn_norm"),
            ("attn_norm_2", "ffn_norm"),
            ("time_mix_receptance", "attn.r_proj"),
            ("time_mix_key", "attn.k_proj"),
            ("time_mix_value", "attn.v_proj"),
            ("time_mix_output", "attn.o_proj"),
            ("time_mix_ln", "attn.g_norm"),
            ("time_mix_w1", "attn.w_lora.lora.0"),
            ("time_mix_w2", "attn.w_lora.lora.2"),
            ("time_mix_a1", "attn.a_lora.lora.0"),
            ("time_mix_a2", "attn.a_lora.lora.2"),
            ("time_mix_v1", "attn.v_lora.lora.0"),
            ("time_mix_v2", "attn.v_lora.lora.2"),
            ("time_mix_g1", "attn.g_lora.lora.0"),
            ("time_mix_g2", "attn.g_lora.lora.2"),
            ("channel_mix_key", "ffn.key"),
            ("channel_mix_value", "ffn.value"),
        ],
        unsuffixed: &[
            ("time_mix_lerp_fused.weight", "attn.x_all"),
            ("time_mix_w0.weight", "attn.w_lora.lora.2.bias"),
            ("time_mix_a0.weight", "attn.a_lora.lora.2.bias"),
            ("time_mix_v0.weight", "attn.v_lora.lora.2.bias"),
            ("time_mix_k_k.weight", "attn.k_k"),
            ("time_mix_k_a.weight", "attn.k_a"),
            ("time_mix_r_k.weight", "attn.r_k"),
            ("channel_mix_lerp_k.weight", "ffn.x_k"),
        ],
        global: &[
            ("token_embd", "model.embeddings"),
            ("token_embd_norm", "model.layers.0.pre_norm"),
            ("output_norm", "model.norm"),
            ("output", "lm_head"),
        ],
        ..GgufFamily::new("rwkv7")
    }),
    // Later layers mix in the values of the first layer.
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

/// The key of the width of a head.
const HEAD_SIZE: &str = "wkv.head_size";

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let rank = |key: &str| header.keys.uint(key, 1, limits::HIDDEN);
    Ok(json!({
        "head_dim": header.keys.required(HEAD_SIZE, limits::HEAD_DIM)?,
        "decay_low_rank_dim": rank("attention.decay_lora_rank")?,
        "a_low_rank_dim": rank("attention.iclr_lora_rank")?,
        "v_low_rank_dim": rank("attention.value_residual_mix_lora_rank")?,
        "gate_low_rank_dim": rank("attention.gate_lora_rank")?,
        "num_attention_heads": Value::Null,
        "num_key_value_heads": Value::Null,
        "rope_theta": Value::Null,
    }))
}

/// Adds the name of the epsilon in flash-linear-attention.
fn write(map: &mut Map<String, Value>) {
    let eps = ["layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"];
    if let Some(eps) = eps.iter().find_map(|name| map.get(*name).cloned()) {
        map.entry("norm_eps").or_insert(eps);
    }
}

/// Fills in missing fields, and computes the number of heads and the width of channel mixing from
/// the hidden size.
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
