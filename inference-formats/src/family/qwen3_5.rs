//! Qwen3.5, of which only the text part is used.

use serde_json::json;

use super::{Family, Recurrence, fill, qwen3_next};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen3_5"],
    complete: |map| {
        qwen3_next::shared(map);
        fill(map, json!({"num_experts": 0}));
    },
    recurrence: Recurrence::Listed,
    reply: Some("qwen3_coder"),
    spare: &["mtp."],
    ..Family::new("qwen3_5_text", "Qwen3_5ForCausalLM", qwen3_next::DEFAULTS)
};
