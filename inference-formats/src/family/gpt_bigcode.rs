//! GPT-BigCode: `StarCoder` 1.

use serde_json::{Map, Value, json};

use crate::limits;

use super::gguf::{GgufFamily, TANH_GELU};
use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    always_tied: true,
    names: &[
        ("transformer.h.", "model.layers."),
        (".attn.c_attn.", ".self_attn.qkv_proj."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".mlp.c_fc.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.wpe.", "model.embed_positions."),
        ("transformer.ln_f.", "model.norm."),
    ],
    // The causal mask, which old checkpoints store.
    buffers: &[".attn.bias", ".attn.masked_bias"],
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        activation_field: "activation_function",
        layer_norm: true,
        // A directory has the names of GPT-2.
        runs_only: true,
        read: |header| {
            let keys = header
                .keys
                .uint("attention.head_count_kv", 1, limits::HEADS)?;
            Ok(json!({"multi_query": keys == Some(1), "activation_function": TANH_GELU}))
        },
        global: &[
            ("token_embd", "model.embed_tokens"),
            ("position_embd", "model.embed_positions"),
            ("output_norm", "model.norm"),
            ("output", "lm_head"),
        ],
        ..GgufFamily::new("starcoder")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Fills in missing fields. Unless `multi_query` is off, all query heads share one key head.
fn complete(map: &mut Map<String, Value>) {
    super::gpt2::complete(map);
    fill(
        map,
        json!({"multi_query": true, "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": true}),
    );
    if map.get("multi_query") == Some(&json!(true)) {
        map.insert("num_key_value_heads".into(), json!(1));
    }
}
