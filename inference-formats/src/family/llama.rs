//! Llama.

use serde_json::Value;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, mixtral};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    aliases: &["iquestcoder", "xverse"],
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        // Mistral and Mixtral files also have the architecture name `llama`. A file with experts is
        // Mixtral.
        read: |header| match header.experts()? {
            Some(experts) => mixtral::read(header, experts),
            None => Ok(Value::Null),
        },
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("llama")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "llama",
        "LlamaForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
