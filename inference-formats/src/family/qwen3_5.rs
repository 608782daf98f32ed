//! Qwen3.5. Only its text part is used.

use serde_json::{Value, json};

use super::{Family, GgufFamily, Recurrence, fill, qwen3_next, ssm};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen3_5"],
    complete: |map| {
        qwen3_next::shared(map);
        fill(map, json!({"num_experts": 0}));
    },
    recurrence: Recurrence::Listed,
    gguf: Some(GgufFamily {
        runs_only: true,
        read: |header| qwen3_next::tiled_mixers(header).map(Value::Object),
        overrides: qwen3_next::NAMES,
        unsuffixed: ssm::vectors!("linear_attn"),
        ..GgufFamily::new("qwen35")
    }),
    reply: Some("qwen3_coder"),
    spare: &["mtp."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new("qwen3_5_text", "Qwen3_5ForCausalLM", qwen3_next::DEFAULTS)
};
