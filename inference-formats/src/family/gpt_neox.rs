//! GPT-NeoX and Pythia.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"partial_rotary_factor": 0.25, "tie_word_embeddings": false}),
        );
    },
    // Masks and rotary frequencies, which old checkpoints store.
    buffers: &[
        ".attention.bias",
        ".attention.masked_bias",
        ".attention.rotary_emb.inv_freq",
    ],
    names: &[
        ("gpt_neox.", "model."),
        ("model.h.", "model.layers."),
        (".attention.query_key_value.", ".self_attn.qkv_proj."),
        (".attention.dense.", ".self_attn.o_proj."),
        (".mlp.dense_h_to_4h.", ".mlp.up_proj."),
        (".mlp.dense_4h_to_h.", ".mlp.down_proj."),
        ("model.final_layer_norm.", "model.norm."),
        ("model.embed_in.", "model.embed_tokens."),
        ("model.embed_out.", "lm_head."),
        ("embed_out.", "lm_head."),
    ],
    gguf: Some(GgufFamily {
        // Readers of these files compute GELU by its tanh approximation.
        activation: "gelu_new",
        layer_norm: true,
        // Rows of queries, keys and values follow each other in files, and alternate in
        // directories.
        runs_only: true,
        read: |header| {
            let keys = &header.keys;
            let parallel = keys.metadata.bool(&keys.key("use_parallel_residual"))?;
            Ok(json!({
                "use_parallel_residual": parallel.unwrap_or(true),
                "attention_bias": header.has("attn_qkv.bias"),
                "hidden_act": "gelu_new",
            }))
        },
        ..GgufFamily::new("gptneox")
    }),
    tensor_parallel: super::TensorParallel::Grouped,
    ..Family::new(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
