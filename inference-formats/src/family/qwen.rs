//! Qwen 1.

use serde_json::{Map, Value, json};

use super::{ChatFormat, Defaults, Family, GgufFamily, Windows, fill, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    complete,
    names: &[
        ("transformer.h.", "model.layers."),
        (".attn.c_attn.", ".self_attn.qkv_proj."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".mlp.w1.", ".mlp.up_proj."),
        (".mlp.w2.", ".mlp.gate_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
    ],
    chat: Some(ChatFormat::ChatMl),
    gguf: Some(GgufFamily {
        // The width in files is also that of gate and up together.
        read: |header| Ok(json!({"head_dim": header.head_dim})),
        ..GgufFamily::new("qwen")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "qwen",
        "QWenLMHeadModel",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Halves `intermediate_size`, which in these files counts the features of gate and up together.
fn prepare(map: &mut Map<String, Value>) {
    if let Some(both) = map.get("intermediate_size").and_then(Value::as_u64) {
        map.insert("intermediate_size".into(), json!(both / 2));
    }
}

fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("kv_channels", "head_dim"),
            ("seq_length", "max_position_embeddings"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "no_bias": true, "tie_word_embeddings": false}),
    );
}
