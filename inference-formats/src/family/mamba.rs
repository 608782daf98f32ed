//! Mamba.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, is_set, mamba2, ssm,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Every,
    gguf: Some(GGUF),
    ..Family::new(
        "mamba",
        "MambaForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Pairs of names: the name in a block of a GGUF file, and the name in a checkpoint with the prefix
/// `$at`.
macro_rules! names {
    ($at:literal $(, $more:expr)* $(,)?) => {
        &[
            ("ssm_in", concat!($at, ".in_proj")),
            ("ssm_conv1d", concat!($at, ".conv1d")),
            ("ssm_x", concat!($at, ".x_proj")),
            ("ssm_dt", concat!($at, ".dt_proj")),
            ("ssm_out", concat!($at, ".out_proj")),
            $($more),*
        ]
    };
}

/// Tensors without a suffix. GGUF files store decay rates, while checkpoints store the logarithms
/// of the negated rates.
macro_rules! vectors {
    ($at:literal) => {
        &[
            ("ssm_a", concat!($at, ".rates")),
            ("ssm_d", concat!($at, ".D")),
        ]
    };
}

pub(super) use {names, vectors};

/// GGUF files of Mamba and of Falcon Mamba.
pub(super) const GGUF: GgufFamily = GgufFamily {
    sizes: ssm::SIZES,
    // GGUF files store the rate. Directories store `ln(-rate)`.
    runs_only: true,
    read,
    overrides: names!("mixer", ("attn_norm", "norm")),
    unsuffixed: vectors!("mixer"),
    global: mamba2::GLOBAL,
    prefix: "backbone.layers.",
    ..GgufFamily::new(ARCHITECTURE)
};

/// The architecture of GGUF files of Mamba and of Falcon Mamba.
pub(super) const ARCHITECTURE: &str = "mamba";

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    Ok(json!({
        "num_attention_heads": 1,
        "num_key_value_heads": Value::Null,
        "head_dim": Value::Null,
        "state_size": keys.required("ssm.state_size", limits::HEAD_DIM)?,
        "time_step_rank": keys.required("ssm.time_step_rank", limits::HIDDEN)?,
        "conv_kernel": keys.required("ssm.conv_kernel", limits::HIDDEN)?,
        "use_bias": header.has("ssm_in.bias"),
        "use_conv_bias": header.has("ssm_conv1d.bias"),
    }))
}

/// Adds the fields that a config.json may leave out. There are no heads; each channel has its own
/// state.
pub(super) fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"state_size": 16, "conv_kernel": 4, "expand": 2, "use_bias": false,
            "num_attention_heads": 1, "tie_word_embeddings": true}),
    );
    let number = |map: &Map<String, Value>, name: &str| map.get(name).and_then(Value::as_u64);
    let hidden = number(map, "hidden_size").unwrap_or(0);
    if !is_set(map, "intermediate_size") {
        let expand = number(map, "expand").unwrap_or(0);
        map.insert(
            "intermediate_size".into(),
            json!(hidden.saturating_mul(expand)),
        );
    }
    rank(map, "time_step_rank");
}

/// The rank of the time-step projection. `auto` means a sixteenth of the hidden width.
pub(super) fn rank(map: &mut Map<String, Value>, name: &str) {
    let hidden = map.get("hidden_size").and_then(Value::as_u64).unwrap_or(0);
    if !is_set(map, name) || map.get(name) == Some(&json!("auto")) {
        map.insert(name.into(), json!(hidden.div_ceil(16)));
    }
}
