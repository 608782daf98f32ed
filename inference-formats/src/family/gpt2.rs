//! GPT-2.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, Renaming, Windows, is_set};

/// The usual field names, each with GPT-2's names for the field.
const FIELDS: [(&str, &[&str]); 6] = [
    ("hidden_size", &["n_embd"]),
    ("num_hidden_layers", &["n_layer"]),
    ("num_attention_heads", &["n_head"]),
    ("intermediate_size", &["n_inner"]),
    ("max_position_embeddings", &["n_positions", "n_ctx"]),
    ("rms_norm_eps", &["layer_norm_epsilon"]),
];

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    older_fields: &[("n_positions", "n_ctx")],
    // GGUF files may also store the output matrix, and do not say that it is tied.
    always_tied: true,
    mlx_lm: Renaming {
        added: "model.",
        dropped: "transformer.",
    },
    transposed: &[
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ],
    // The causal mask, which old checkpoints store.
    buffers: &[".attn.bias", ".attn.masked_bias"],
    gguf: Some(GgufFamily {
        activation: "gelu_new",
        activation_field: "activation_function",
        layer_norm: true,
        write,
        block: &[
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        ],
        global: &[
            ("token_embd", "wte"),
            ("position_embd", "wpe"),
            ("output_norm", "ln_f"),
            ("output", "lm_head"),
        ],
        prefix: "h.",
        ..GgufFamily::new("gpt2")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gpt2",
        "GPT2LMHeadModel",
        Defaults {
            norm_eps: 1e-5,
            // Positions are learned embeddings, so no code reads this value.
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Computes the width of the feed-forward block, which GPT-2's files may omit.
pub(super) fn complete(map: &mut Map<String, Value>) {
    if !is_set(map, "intermediate_size")
        && let Some(width) = map.get("hidden_size").and_then(Value::as_u64)
    {
        map.insert("intermediate_size".into(), json!(width.saturating_mul(4)));
    }
}

fn write(config: &mut Map<String, Value>) {
    for (usual, names) in FIELDS {
        if let Some(value) = config.remove(usual) {
            for name in names {
                config.insert((*name).to_owned(), value.clone());
            }
        }
    }
    for name in ["num_key_value_heads", "rope_theta", "head_dim"] {
        config.remove(name);
    }
    config.insert("tie_word_embeddings".into(), json!(true));
}
