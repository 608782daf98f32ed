//! LFM2 with mixtures of experts.

use serde_json::{Map, Value, json};

use super::{Family, Recurrence, fill, lfm2};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("lfm2"),
    ..Family::new("lfm2_moe", "Lfm2MoeForCausalLM", lfm2::DEFAULTS)
};

fn complete(map: &mut Map<String, Value>) {
    lfm2::shared(map);
    fill(
        map,
        json!({"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792, "use_expert_bias": true, "norm_topk_prob": true,
            "routed_scaling_factor": 1.0}),
    );
}
