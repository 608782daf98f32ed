//! Mixtral.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufExport, GgufFamily, GgufHeader, Windows, fill};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"num_local_experts": 8, "num_experts_per_tok": 2}),
        );
    },
    gguf: Some(GgufFamily {
        is_variant: true,
        permuted: true,
        mixture: "block_sparse_moe",
        export: Some(GgufExport {
            numbers: &[
                ("expert_count", "num_local_experts"),
                ("expert_used_count", "num_experts_per_tok"),
            ],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("llama")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "mixtral",
        "MixtralForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::All,
        },
    )
};

/// Reads the fields of a GGUF file with the architecture name `llama` and with experts.
pub(super) fn read(header: &GgufHeader<'_>, experts: usize) -> Result<Value> {
    Ok(json!({
        "model_type": FAMILY.model_type,
        "num_local_experts": experts,
        "num_experts_per_tok": header.keys.required("expert_used_count", limits::EXPERTS)?,
    }))
}
