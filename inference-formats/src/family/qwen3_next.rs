//! Qwen3-Next.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Names, Recurrence, Windows, fill, list_layers,
    qwen2_moe, ssm,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    gguf: Some(GgufFamily {
        runs_only: true,
        read,
        overrides: NAMES,
        unsuffixed: ssm::vectors!("linear_attn"),
        ..GgufFamily::new("qwen3next")
    }),
    reply: Some("hermes"),
    spare: &["mtp."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new("qwen3_next", "Qwen3NextForCausalLM", DEFAULTS)
};

/// Values that the configurations of families with a gated delta net leave out.
pub(super) const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-6,
    rope_theta: 10_000.0,
    windows: Windows::Never,
};

/// Names inside the blocks of GGUF files. One matrix has queries, keys and values, another the
/// output gates. Write strengths and forget gates are one matrix, grouped by key heads, in
/// Qwen3-Next, and two in Qwen3.5.
pub(super) const NAMES: Names = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
];

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = qwen2_moe::mixture(header, true)?;
    if let Value::Object(fields) = &mut fields {
        fields.extend(mixers(header)?);
    }
    Ok(fields)
}

/// The fields of Qwen3.5's mixers. In its files, value heads are in another order than in
/// directories: first one of each key head, then the second of each, and so on.
pub(super) fn tiled_mixers(header: &GgufHeader<'_>) -> Result<Map<String, Value>> {
    let mut fields = mixers(header)?;
    fields.insert("linear_value_heads_tiled".into(), json!(true));
    Ok(fields)
}

/// The fields of the layers with a gated delta net, and which layers these are.
fn mixers(header: &GgufHeader<'_>) -> Result<Map<String, Value>> {
    let keys = &header.keys;
    let sizes = ssm::Sizes::read(header)?;
    let mut fields = Map::new();
    let interval = keys.uint("full_attention_interval", 1, limits::LAYERS)?;
    fields.insert(
        "full_attention_interval".into(),
        json!(interval.unwrap_or(4)),
    );
    for (field, size) in [
        ("linear_num_value_heads", sizes.heads),
        ("linear_value_head_dim", sizes.dim),
        ("linear_num_key_heads", sizes.groups),
        ("linear_key_head_dim", sizes.state),
        ("linear_conv_kernel_dim", sizes.conv),
    ] {
        fields.insert(field.into(), json!(size));
    }
    Ok(fields)
}

fn complete(map: &mut Map<String, Value>) {
    shared(map);
    fill(
        map,
        json!({"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512}),
    );
}

/// Completes the fields that these families have in common.
pub(super) fn shared(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"partial_rotary_factor": 0.25, "head_dim": 256, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "full_attention_interval": 4, "norm_topk_prob": true,
            "tie_word_embeddings": false}),
    );
    let interval = map.get("full_attention_interval").and_then(Value::as_u64);
    let interval = usize::try_from(interval.unwrap_or(0)).unwrap_or(0);
    list_layers(map, |i| {
        // Without an interval no layer has attention, which is rejected later.
        if interval > 0 && (i + 1).is_multiple_of(interval) {
            "full_attention"
        } else {
            "linear_attention"
        }
    });
}
