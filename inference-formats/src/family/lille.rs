//! Lille.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, is_set, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    always_tied: true,
    names: &[
        ("transformer.layers.", "model.layers."),
        (".attention.norm.", ".input_layernorm."),
        (".attention.out_proj.", ".self_attn.o_proj."),
        (".attention.", ".self_attn."),
        (".feed_forward.norm.", ".post_attention_layernorm."),
        (".feed_forward.", ".mlp."),
        ("transformer.tok_embeddings.", "model.embed_tokens."),
        ("transformer.norm.", "model.norm."),
    ],
    // The rotation, which checkpoints store.
    buffers: &["rotary_emb"],
    spare: &["transformer.rotary_emb."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "lille-130m",
        "LilleForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies fields to their usual names, and computes the width of the feed-forward part from the
/// hidden size.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("n_kv_heads", "num_key_value_heads"),
            ("block_size", "max_position_embeddings"),
        ],
    );
    let hidden = map.get("hidden_size").and_then(Value::as_u64);
    if let Some(hidden) = hidden.filter(|_| !is_set(map, "intermediate_size")) {
        let width = hidden.saturating_mul(8) / 3;
        let width = (width as f64 / 256.0).round_ties_even() * 256.0;
        map.insert("intermediate_size".into(), json!(width));
    }
}
