//! Gemma 3: text models, and the text part of multimodal ones.

use serde_json::json;

use super::gguf::{SANDWICH, TANH_GELU, add, quotient};
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// Number of layers in the largest model.
const LAYERS_OF_27B: usize = 62;

/// Rotary base of sliding layers. GGUF metadata do not contain it.
const LOCAL_BASE: f32 = 10_000.0;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["gemma3"],
    complete: |map| {
        fill(
            map,
            json!({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "vocab_size": 262_208, "rope_local_base_freq": 1e4,
                "query_pre_attn_scalar": 256, "sliding_window": 4096,
                "max_position_embeddings": 131_072}),
        );
    },
    chat: Some(ChatFormat::Gemma),
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        norm_plus_one: true,
        read: |header| {
            let local = header.keys.positive("rope.freq_base_swa")?;
            Ok(json!({
                "sliding_window": header.window()?,
                "query_pre_attn_scalar": header.score_dim(LAYERS_OF_27B),
                "rope_local_base_freq": local.unwrap_or(LOCAL_BASE),
            }))
        },
        // Readers expect the pattern under different names, so both names are written.
        write: |config| {
            let fields = json!({"head_dim": quotient(config), "sliding_window_pattern": 6,
                "_sliding_window_pattern": 6});
            add(config, fields);
        },
        export: Some(GgufExport {
            numbers: &[("attention.sliding_window", "sliding_window")],
            absent: &[
                "use_bidirectional_attention",
                "attn_logit_softcapping",
                "final_logit_softcapping",
            ],
            multimodal: &["gemma3"],
            activations: &["gelu"],
            ..GgufExport::PLAIN
        }),
        overrides: SANDWICH,
        ..GgufFamily::new("gemma3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gemma3_text",
        "Gemma3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 1e6,
            windows: Windows::AllBut {
                every: 6,
                last_is_full: false,
            },
        },
    )
};
