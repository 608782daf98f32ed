//! Mamba-2.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, is_set, rename, ssm,
};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    gguf: Some(GgufFamily {
        sizes: ssm::SIZES,
        runs_only: true,
        read,
        overrides: ssm::names!("mixer", ("attn_norm", "norm")),
        unsuffixed: ssm::vectors!("mixer"),
        global: GLOBAL,
        prefix: "backbone.layers.",
        ..GgufFamily::new("mamba2")
    }),
    ..Family::new(
        "mamba2",
        "Mamba2ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Names outside of blocks, also for Nemotron-H.
pub(super) const GLOBAL: super::Names = &[
    ("token_embd", "backbone.embeddings"),
    ("output_norm", "backbone.norm_f"),
    ("output", "lm_head"),
];

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let sizes = ssm::Sizes::read(header)?;
    Ok(json!({
        "num_heads": sizes.heads,
        "num_key_value_heads": Value::Null,
        "head_dim": sizes.dim,
        "state_size": sizes.state,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.conv,
        "use_bias": header.has("ssm_in.bias"),
        "use_conv_bias": header.has("ssm_conv1d.bias"),
    }))
}

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8,
            "conv_kernel": 4, "use_bias": false, "tie_word_embeddings": false}),
    );
    rename(
        map,
        &[
            ("num_heads", "num_attention_heads"),
            ("state_size", "ssm_state_size"),
        ],
    );
    if !is_set(map, "intermediate_size") {
        let number = |name: &str| map.get(name).and_then(Value::as_u64).unwrap_or(0);
        let width = number("num_heads").saturating_mul(number("head_dim"));
        map.insert("intermediate_size".into(), json!(width));
    }
}
