//! Qwen 3 with a mixture of experts.

use serde_json::json;

use super::gguf::{add, quotient};
use super::qwen2_moe::{self, mixture};
use super::{Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["qwen3_vl_moe"],
    reply: Some("hermes"),
    gguf: Some(GgufFamily {
        // The text part of multimodal models. All coordinates of a text's positions are equal, so
        // the rotation is the usual one.
        also: &["qwen3vlmoe"],
        optional_biases: true,
        read: |header| mixture(header, true),
        write: |config| {
            let fields = json!({"head_dim": quotient(config), "decoder_sparse_step": 1,
                "mlp_only_layers": []});
            add(config, fields);
        },
        export: Some(GgufExport {
            numbers: qwen2_moe::EXPERTS,
            assumed: &[("decoder_sparse_step", 1)],
            absent: &["mlp_only_layers"],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("qwen3moe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::FromLayer,
        },
    )
};
