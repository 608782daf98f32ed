//! EXAONE 3 and 3.5.

use super::gguf::publish;
use super::{Defaults, Family, GgufExport, GgufFamily, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    names: &[
        ("transformer.h.", "model.layers."),
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.ln_f.", "model.norm."),
        (".attn.attention.out_proj.", ".self_attn.o_proj."),
        (".attn.attention.", ".self_attn."),
        (".ln_1.", ".input_layernorm."),
        (".ln_2.", ".post_attention_layernorm."),
        (".mlp.c_fc_0.", ".mlp.gate_proj."),
        (".mlp.c_fc_1.", ".mlp.up_proj."),
        (".mlp.c_proj.", ".mlp.down_proj."),
    ],
    gguf: Some(GgufFamily {
        activation_field: "activation_function",
        write: |config| {
            publish(
                config,
                &[
                    ("num_hidden_layers", "num_layers"),
                    ("rms_norm_eps", "layer_norm_epsilon"),
                ],
            );
        },
        export: Some(GgufExport::PLAIN),
        ..GgufFamily::new("exaone")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "exaone",
        "ExaoneForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
