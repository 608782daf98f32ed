//! Nemotron and Minitron.

use serde_json::json;

use super::gguf::publish;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"partial_rotary_factor": 0.5, "hidden_act": "relu2"}),
        );
    },
    gguf: Some(GgufFamily {
        activation: "relu2",
        layer_norm: true,
        norm_plus_one: true,
        optional_biases: true,
        read: |header| Ok(json!({"mlp_bias": header.has("ffn_up.bias")})),
        write: |config| publish(config, &[("rms_norm_eps", "norm_eps")]),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("nemotron")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "nemotron",
        "NemotronForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
