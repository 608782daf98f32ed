//! StableLM.

use serde_json::json;

use super::gguf::publish;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"partial_rotary_factor": 0.25, "tie_word_embeddings": false}),
        );
    },
    gguf: Some(GgufFamily {
        layer_norm: true,
        read: |header| {
            let keys = &header.keys;
            // If attention and the feed-forward part read the same input, a block has only one
            // norm.
            let parallel = keys.metadata.bool(&keys.key("use_parallel_residual"))?;
            Ok(json!({
                "use_parallel_residual": parallel.unwrap_or(true) && !header.has("ffn_norm.weight"),
                "use_qkv_bias": header.has_query_biases(),
                "qk_layernorm": header.has("attn_q_norm.weight"),
            }))
        },
        write: |config| publish(config, &[("rms_norm_eps", "layer_norm_eps")]),
        export: Some(GgufExport {
            flags: &[("use_parallel_residual", "use_parallel_residual")],
            ..GgufExport::PLAIN
        }),
        ..GgufFamily::new("stablelm")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "stablelm",
        "StableLmForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
