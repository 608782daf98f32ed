//! Qwen3.5 with mixtures of experts. Only its text part is used.

use serde_json::{Value, json};

use super::{Family, GgufFamily, Recurrence, fill, qwen2_moe, qwen3_next, ssm};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen3_5_moe"],
    complete: |map| {
        qwen3_next::shared(map);
        // Every layer has experts, so the file may lack a dense width.
        fill(
            map,
            json!({"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512, "intermediate_size": 512}),
        );
    },
    recurrence: Recurrence::Listed,
    gguf: Some(GgufFamily {
        runs_only: true,
        read: |header| {
            let mut fields = qwen2_moe::mixture(header, true)?;
            if let Value::Object(fields) = &mut fields {
                fields.extend(qwen3_next::tiled_mixers(header)?);
            }
            Ok(fields)
        },
        overrides: qwen3_next::NAMES,
        unsuffixed: ssm::vectors!("linear_attn"),
        ..GgufFamily::new("qwen35moe")
    }),
    reply: Some("qwen3_coder"),
    spare: &["mtp."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        qwen3_next::DEFAULTS,
    )
};
