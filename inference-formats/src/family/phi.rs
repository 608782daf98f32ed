//! Phi 1, 1.5 and 2.

use serde_json::json;

use super::gguf::publish;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}),
        );
    },
    names: &[
        (".self_attn.dense.", ".self_attn.o_proj."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
        ("model.final_layernorm.", "model.norm."),
    ],
    gguf: Some(GgufFamily {
        activation: "gelu_new",
        layer_norm: true,
        write: |config| publish(config, &[("rms_norm_eps", "layer_norm_eps")]),
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("phi2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "phi",
        "PhiForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
