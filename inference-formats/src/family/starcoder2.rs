//! StarCoder2.

use serde_json::json;

use super::gguf::{TANH_GELU, add};
use super::{Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        layer_norm: true,
        write: |config| {
            add(config, json!({"use_bias": true}));
            if let Some(eps) = config.remove("rms_norm_eps") {
                config.insert("norm_epsilon".into(), eps);
            }
        },
        overrides: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("starcoder2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "starcoder2",
        "Starcoder2ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::All,
        },
    )
};
