//! Qwen 2 with a mixture of experts.

use serde_json::{Value, json};

use super::gguf::add;
use super::{Defaults, Family, GgufExport, GgufFamily, GgufHeader, Names, Windows, fill};
use crate::error::Result;
use crate::limits;

/// Keys of the sizes of Qwen's mixtures, each with its field of `config.json`.
pub(super) const EXPERTS: Names = &[
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    (
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
    ),
];

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"decoder_sparse_step": 1})),
    gguf: Some(GgufFamily {
        read: |header| mixture(header, false),
        write: |config| {
            let fields = json!({"decoder_sparse_step": 1, "mlp_only_layers": [],
                "use_sliding_window": false});
            add(config, fields);
        },
        export: Some(GgufExport {
            numbers: EXPERTS,
            assumed: &[("decoder_sparse_step", 1)],
            absent: &["mlp_only_layers"],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("qwen2moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::FromLayer,
        },
    )
};

/// Reads the fields of Qwen's mixtures. `normalized` says whether the weights of the chosen experts
/// are scaled to a sum of 1.
pub(super) fn mixture(header: &GgufHeader<'_>, normalized: bool) -> Result<Value> {
    let keys = &header.keys;
    Ok(json!({
        "num_experts": header.experts()?,
        "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        "moe_intermediate_size":
            keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?,
        "shared_expert_intermediate_size":
            keys.uint("expert_shared_feed_forward_length", 1, limits::INTERMEDIATE)?,
        "norm_topk_prob": normalized,
    }))
}
