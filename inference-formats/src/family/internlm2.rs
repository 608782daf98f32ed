//! InternLM 2 and 2.5.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, Windows, fill, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        ("model.tok_embeddings.", "model.embed_tokens."),
        (".attention.wqkv.", ".self_attn.qkv_proj."),
        (".attention.wo.", ".self_attn.o_proj."),
        (".attention_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".feed_forward.w1.", ".mlp.gate_proj."),
        (".feed_forward.w2.", ".mlp.down_proj."),
        (".feed_forward.w3.", ".mlp.up_proj."),
        ("output.", "lm_head."),
    ],
    buffers: &[".attention.rope.inv_freq"],
    gguf: Some(GgufFamily {
        permuted: true,
        optional_biases: true,
        // GGUF files have three matrices where directories have one fused matrix.
        runs_only: true,
        ..GgufFamily::new("internlm2")
    }),
    tensor_parallel: super::TensorParallel::Grouped,
    ..Family::new(
        "internlm2",
        "InternLM2ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies `bias`, which applies to all attention projections, to its usual name.
fn complete(map: &mut Map<String, Value>) {
    rename(map, &[("bias", "attention_bias")]);
    fill(map, json!({"attention_bias": true}));
}
