//! Gemma 2.

use serde_json::json;

use super::gguf::{SANDWICH, TANH_GELU, add, quotient};
use super::{ChatFormat, Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// Number of layers in the largest model.
const LAYERS_OF_27B: usize = 46;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        );
    },
    chat: Some(ChatFormat::Gemma),
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        norm_plus_one: true,
        read: |header| {
            Ok(json!({
                "sliding_window": header.window()?,
                "attn_logit_softcapping": header.keys.positive("attn_logit_softcapping")?,
                "final_logit_softcapping": header.keys.positive("final_logit_softcapping")?,
                "query_pre_attn_scalar": header.score_dim(LAYERS_OF_27B),
            }))
        },
        // transformers has another default for `head_dim`, so this quotient is written.
        write: |config| add(config, json!({"head_dim": quotient(config)})),
        export: Some(GgufExport {
            numbers: &[("attention.sliding_window", "sliding_window")],
            floats: &[
                ("attn_logit_softcapping", "attn_logit_softcapping"),
                ("final_logit_softcapping", "final_logit_softcapping"),
            ],
            activations: &["gelu"],
            ..GgufExport::PLAIN
        }),
        overrides: SANDWICH,
        ..GgufFamily::new("gemma2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gemma2",
        "Gemma2ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 2,
                last_is_full: false,
            },
        },
    )
};
