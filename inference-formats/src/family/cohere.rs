//! Cohere's Command R.

use serde_json::json;

use super::gguf::publish;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"logit_scale": 0.0625, "tie_word_embeddings": true}),
        );
    },
    reply: Some("command_r"),
    gguf: Some(GgufFamily {
        read: |header| {
            Ok(json!({
                "logit_scale": header.keys.positive("logit_scale")?,
                "use_qk_norm": header.has("attn_q_norm.weight"),
            }))
        },
        export: Some(GgufExport {
            floats: &[("logit_scale", "logit_scale")],
            absent: &["layer_norm_bias"],
            ..GgufExport::PLAIN
        }),
        ..files("command-r")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "cohere",
        "CohereForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 500_000.0,
            windows: Windows::Never,
        },
    )
};

/// The GGUF files of Cohere's families, under the name of an architecture.
pub(super) const fn files(architecture: &'static str) -> GgufFamily {
    GgufFamily {
        layer_norm: true,
        optional_biases: true,
        write: |config| publish(config, &[("rms_norm_eps", "layer_norm_eps")]),
        ..GgufFamily::new(architecture)
    }
}
