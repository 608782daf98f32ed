//! LFM2 with mixtures of experts.

use serde_json::{Map, Value, json};

use super::{Family, GgufFamily, GgufHeader, Recurrence, fill, lfm2};
use crate::error::Result;
use crate::limits;

/// llama.cpp's number for router scores by sigmoid.
const SIGMOID: usize = 2;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("lfm2"),
    gguf: Some(GgufFamily {
        layers_differ: true,
        read,
        overrides: lfm2::NAMES,
        unsuffixed: &[("exp_probs_b.bias", "feed_forward.expert_bias")],
        global: lfm2::GLOBAL,
        ..GgufFamily::new("lfm2moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
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

/// Reads the fields of a GGUF file: layers and experts. Router weights are normalized to a sum of
/// one, unless the file disables it.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let gating = keys.uint("expert_gating_func", 0, limits::EXPERTS)?;
    if let Some(other) = gating.filter(|n| *n != SIGMOID) {
        let message = format!("is {other}; only {SIGMOID}, a sigmoid, is supported");
        return Err(keys.unsupported("expert_gating_func", message));
    }
    let mut fields = lfm2::convolutions(header)?;
    let dense = keys.uint("leading_dense_block_count", 0, header.layers)?;
    fields["num_dense_layers"] = json!(dense.unwrap_or(0));
    fields["num_experts"] = json!(header.experts()?);
    fields["num_experts_per_tok"] = json!(keys.required("expert_used_count", limits::EXPERTS)?);
    fields["moe_intermediate_size"] =
        json!(keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?);
    let normed = keys.metadata.bool(&keys.key("expert_weights_norm"))?;
    fields["norm_topk_prob"] = json!(normed.unwrap_or(true));
    let scale = keys.positive("expert_weights_scale")?;
    fields["routed_scaling_factor"] = json!(scale.unwrap_or(1.0));
    let bias = format!("blk.{}.exp_probs_b.bias", dense.unwrap_or(0));
    fields["use_expert_bias"] = json!(header.file.tensors().contains_key(&bias));
    Ok(fields)
}
