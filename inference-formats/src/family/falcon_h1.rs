//! Falcon-H1: attention and Mamba-2 side by side in each block.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Names, Recurrence, Windows, fill, ssm};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Beside,
    gguf: Some(GgufFamily {
        runs_only: true,
        read,
        overrides: ssm::names!(
            "mamba",
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
        ),
        // In GGUF files this name has no suffix.
        unsuffixed: ssm::vectors!("mamba", ("ffn_norm", "pre_ff_layernorm.weight")),
        global: GLOBAL,
        ..GgufFamily::new("falcon-h1")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "falcon_h1",
        "FalconH1ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Names outside of blocks.
const GLOBAL: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.final_layernorm"),
    ("output", "lm_head"),
];

/// Reads the fields of a GGUF file. The file has no factors, because the converter multiplies them
/// into the matrices. llama.cpp applies the norm after the gate.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let sizes = ssm::Sizes::read(header)?;
    Ok(json!({
        "mamba_d_ssm": sizes.inner,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.dim,
        "mamba_d_state": sizes.state,
        "mamba_n_groups": sizes.groups,
        "mamba_d_conv": sizes.conv,
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
        "projectors_bias": header.has("ssm_out.bias"),
        "attention_bias": header.has_query_biases(),
        "mlp_bias": header.has("ffn_gate.bias"),
        "mamba_rms_norm": header.has("ssm_norm.weight"),
        "mamba_norm_before_gate": false,
    }))
}

fn complete(map: &mut Map<String, Value>) {
    // All blocks are of one kind, so the list is removed.
    map.remove("layer_types");
    fill(
        map,
        json!({"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_d_head": "auto", "mamba_norm_before_gate": true,
            "tie_word_embeddings": false}),
    );
    if map.get("mamba_d_head") == Some(&json!("auto")) {
        let number = |name: &str| map.get(name).and_then(Value::as_u64);
        let width = number("mamba_d_ssm").or_else(|| {
            let hidden = number("hidden_size")?;
            Some(number("mamba_expand")?.saturating_mul(hidden))
        });
        // Without heads, the result is null, which is later rejected as a missing width.
        let heads = number("mamba_n_heads").unwrap_or(0);
        let dim = width.and_then(|width| width.checked_div(heads));
        map.insert("mamba_d_head".into(), json!(dim));
    }
}
