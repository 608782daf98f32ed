//! GPT-J.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    // The causal mask, which old checkpoints store.
    buffers: &[".attn.bias", ".attn.masked_bias"],
    names: &[
        ("transformer.", "model."),
        ("model.h.", "model.layers."),
        (".attn.out_proj.", ".self_attn.o_proj."),
        (".attn.", ".self_attn."),
        (".ln_1.", ".input_layernorm."),
        (".mlp.fc_in.", ".mlp.up_proj."),
        (".mlp.fc_out.", ".mlp.down_proj."),
        ("model.wte.", "model.embed_tokens."),
        ("model.ln_f.", "model.norm."),
    ],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "gptj",
        "GPTJForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

fn complete(map: &mut Map<String, Value>) {
    super::gpt2::complete(map);
    super::rotated_elements(map);
    fill(
        map,
        json!({"activation_function": "gelu_new", "tie_word_embeddings": false}),
    );
}
