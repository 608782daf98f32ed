//! OLMoE.

use serde_json::json;

use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"norm_topk_prob": false, "num_experts_per_tok": 8, "num_experts": 64}),
        );
    },
    gguf: Some(GgufFamily {
        optional_biases: true,
        read: |header| {
            let per_token = header.keys.required("expert_used_count", limits::EXPERTS)?;
            Ok(json!({"num_experts": header.experts()?, "num_experts_per_tok": per_token}))
        },
        export: Some(GgufExport::EXPERTS),
        ..GgufFamily::new("olmoe")
    }),
    tensor_parallel: super::TensorParallel::HeadsAndNorms,
    ..Family::new(
        "olmoe",
        "OlmoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
