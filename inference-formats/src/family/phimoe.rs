//! Phi-3.5-MoE.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"router_jitter_noise": 0.01})),
    gguf: Some(GgufFamily {
        mixture: "block_sparse_moe",
        read: |header| {
            let per_token = header.keys.required("expert_used_count", limits::EXPERTS)?;
            Ok(json!({"num_local_experts": header.experts()?, "num_experts_per_tok": per_token}))
        },
        ..GgufFamily::new("phimoe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "phimoe",
        "PhimoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};
