//! Gemma 4: text models, and the text part of multimodal ones.

use serde_json::json;

use super::{ChatFormat, Defaults, Family, Windows, fill};

/// The descriptor.
pub static FAMILY: Family = Family {
    multimodal: Some("gemma4"),
    complete: |map| {
        fill(
            map,
            json!({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
                "hidden_size_per_layer_input": 256, "sliding_window": 512,
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                        "partial_rotary_factor": 0.25},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        );
    },
    chat: Some(ChatFormat::Gemma),
    reply: Some("gemma4"),
    pipeline: false,
    ..Family::new(
        "gemma4_text",
        "Gemma4ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 6,
                last_is_full: true,
            },
        },
    )
};
