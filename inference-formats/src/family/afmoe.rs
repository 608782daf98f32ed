//! Arcee's mixtures of experts: Trinity.

use serde_json::{Map, Value, json};

use super::gguf::publish;
use super::{Defaults, Family, GgufFamily, GgufHeader, Names, Windows, fill, rename, routed};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    names: &[
        (".pre_mlp_layernorm.", ".pre_feedforward_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
        (".mlp.router.gate.", ".mlp.gate."),
        (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        // mlx-lm's names of stacked experts.
        (".mlp.experts.gate_proj.", ".mlp.switch_mlp.gate_proj."),
        (".mlp.experts.up_proj.", ".mlp.switch_mlp.up_proj."),
        (".mlp.experts.down_proj.", ".mlp.switch_mlp.down_proj."),
    ],
    gguf: Some(GgufFamily {
        optional_biases: true,
        read,
        write: |config| {
            const NAMES: Names = &[
                ("first_k_dense_replace", "num_dense_layers"),
                ("n_routed_experts", "num_experts"),
                ("n_shared_experts", "num_shared_experts"),
                ("routed_scaling_factor", "route_scale"),
                ("norm_topk_prob", "route_norm"),
                ("scoring_func", "score_func"),
            ];
            publish(config, NAMES);
        },
        overrides: routed::names!(
            ("attn_gate", "self_attn.gate_proj"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("afmoe")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "afmoe",
        "AfmoeForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 4,
                last_is_full: false,
            },
        },
    )
};

/// Reads the fields of a GGUF file. Readers of these files always scale the embedding.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = routed::read(header, &routed::NORMALIZED_SIGMOIDS)?;
    fields["mup_enabled"] = json!(true);
    fields["sliding_window"] = json!(header.window()?);
    fields["layer_types"] = json!(header.layer_types()?);
    Ok(fields)
}

/// Copies fields of attention and experts to their usual names, and fills in missing fields.
fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("global_attn_every_n_layers", "sliding_window_pattern"),
            ("num_dense_layers", "first_k_dense_replace"),
            ("num_experts", "n_routed_experts"),
            ("num_shared_experts", "n_shared_experts"),
            ("route_scale", "routed_scaling_factor"),
            ("route_norm", "norm_topk_prob"),
            ("score_func", "scoring_func"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "sliding_window": 1024, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, "norm_topk_prob": true, "n_group": 1, "topk_group": 1,
            "mup_enabled": false}),
    );
}
