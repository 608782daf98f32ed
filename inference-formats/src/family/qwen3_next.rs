//! Qwen3-Next.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, list_layers};

/// The descriptor.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    reply: Some("hermes"),
    spare: &["mtp."],
    ..Family::new("qwen3_next", "Qwen3NextForCausalLM", DEFAULTS)
};

/// What the families with a gated delta net leave out.
pub(super) const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-6,
    rope_theta: 10_000.0,
    windows: Windows::Never,
};

fn complete(map: &mut Map<String, Value>) {
    shared(map);
    fill(
        map,
        json!({"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512}),
    );
}

/// What these families have in common.
pub(super) fn shared(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"partial_rotary_factor": 0.25, "head_dim": 256, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "full_attention_interval": 4, "norm_topk_prob": true,
            "tie_word_embeddings": false}),
    );
    let interval = map.get("full_attention_interval").and_then(Value::as_u64);
    let interval = usize::try_from(interval.unwrap_or(0)).unwrap_or(0);
    list_layers(map, |i| {
        // Without an interval no layer has attention; it is refused later.
        if interval > 0 && (i + 1).is_multiple_of(interval) {
            "full_attention"
        } else {
            "linear_attention"
        }
    });
}
