//! Mistral.

use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    chat: Some(ChatFormat::Mistral),
    gguf: Some(GgufFamily {
        // GGUF files of Mistral and of Llama have no difference, and both networks compute equal
        // results.
        is_variant: true,
        permuted: true,
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("llama")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "mistral",
        "MistralForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::All,
        },
    )
};
