//! Jamba.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, list_layers, mamba};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    names: &[
        (".feed_forward.", ".mlp."),
        (".pre_ff_layernorm.", ".post_attention_layernorm."),
        ("model.final_layernorm.", "model.norm."),
    ],
    ..Family::new(
        "jamba",
        "JambaForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// A period and an offset determine which layers have attention.
fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2,
            "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "tie_word_embeddings": false}),
    );
    mamba::rank(map, "mamba_dt_rank");
    let number = |name: &str, otherwise: u64| {
        let value = map.get(name).and_then(Value::as_u64);
        usize::try_from(value.unwrap_or(otherwise)).unwrap_or(usize::MAX)
    };
    let (period, offset) = (
        number("attn_layer_period", 8).max(1),
        number("attn_layer_offset", 4),
    );
    list_layers(map, |layer| match layer % period == offset {
        true => "attention",
        false => "mamba",
    });
}
