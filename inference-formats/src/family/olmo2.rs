//! OLMo 2.

use serde_json::Value;

use super::gguf::SANDWICH;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows, olmo3};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        optional_biases: true,
        // OLMo 3 shares the architecture's name; a file with a window is OLMo 3.
        read: |header| match header.window()? {
            Some(window) => olmo3::read(header, window),
            None => Ok(Value::Null),
        },
        // The family has no norms before the two parts, so `ffn_norm` is never requested.
        overrides: SANDWICH,
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("olmo2")
    }),
    tensor_parallel: super::TensorParallel::HeadsAndNorms,
    ..Family::new(
        "olmo2",
        "Olmo2ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
