//! Granite 3 with mixtures of experts.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, granite};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        mixture: "block_sparse_moe",
        read,
        overrides: &[("ffn_gate_inp", "mlp.router.layer")],
        ..GgufFamily::new("granitemoe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    joined_experts: super::JoinedExperts::GRANITE,
    ..Family::new(
        "granitemoe",
        "GraniteMoeForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    if header.has("ffn_up_shexp.weight") {
        let message = "shared experts are not supported in this architecture";
        return Err(keys.unsupported("expert_shared_feed_forward_length", message));
    }
    let mut fields = granite::factors(header)?;
    fields.insert("num_local_experts".into(), json!(header.experts()?));
    let per_token = keys.required("expert_used_count", limits::EXPERTS)?;
    fields.insert("num_experts_per_tok".into(), json!(per_token));
    Ok(Value::Object(fields))
}
