//! nanochat.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(map, json!({"hidden_act": "relu2"}));
        // A null means that logits are not capped, so only a missing field gets the default.
        map.entry("final_logit_softcapping").or_insert(json!(15.0));
    },
    // Names of mlx-lm, then of transformers.
    names: &[
        ("transformer.h.", "model.layers."),
        ("transformer.wte.", "model.embed_tokens."),
        (".attn.c_q.", ".self_attn.q_proj."),
        (".attn.c_k.", ".self_attn.k_proj."),
        (".attn.c_v.", ".self_attn.v_proj."),
        (".attn.c_proj.", ".self_attn.o_proj."),
        (".mlp.c_fc.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
    ],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "nanochat",
        "NanoChatForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
