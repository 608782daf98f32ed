//! Kimi Linear.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, Recurrence, Windows, fill, is_set, list_layers, rename};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    latent: true,
    names: &[
        (".block_sparse_moe.", ".mlp."),
        // mlx-lm's names.
        (
            ".mlp.e_score_correction_bias",
            ".mlp.gate.e_score_correction_bias",
        ),
        (".q_conv.conv.", ".q_conv1d."),
        (".k_conv.conv.", ".k_conv1d."),
        (".v_conv.conv.", ".v_conv1d."),
    ],
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["model.mtp"],
    reply: Some("kimi_k2"),
    pipeline: false,
    ..Family::new(
        "kimi_linear",
        "KimiLinearForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// An object has the sizes of linear layers, and the numbers of layers of each kind, from 1.
fn complete(map: &mut Map<String, Value>) {
    let linear = |name: &str| {
        let value = map.get("linear_attn_config").and_then(|of| of.get(name));
        value.filter(|value| !value.is_null()).cloned()
    };
    let sizes = [
        ("head_dim", "linear_head_dim"),
        ("num_heads", "linear_num_heads"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    ]
    .map(|(from, to)| (to, linear(from)));
    let kinds = linear("kda_layers");
    for (name, value) in sizes {
        if let Some(value) = value {
            map.insert(name.to_owned(), value);
        }
    }
    rename(
        map,
        &[
            ("num_experts_per_token", "num_experts_per_tok"),
            ("num_shared_experts", "n_shared_experts"),
            ("moe_renormalize", "norm_topk_prob"),
            ("moe_router_activation_func", "scoring_func"),
            ("num_expert_group", "n_group"),
            ("model_max_length", "max_position_embeddings"),
        ],
    );
    fill(
        map,
        json!({"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": true,
            "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1, "tie_word_embeddings": false}),
    );
    let experts = ["num_experts", "num_local_experts"];
    if experts.iter().all(|name| !is_set(map, name)) {
        map.insert("num_experts".into(), json!(256));
    }
    let layers = limits::LAYERS as u64;
    let numbers: Option<Vec<u64>> = kinds.as_ref().and_then(Value::as_array).map(|numbers| {
        let numbers = numbers.iter().filter_map(Value::as_u64);
        numbers.filter(|n| *n <= layers).collect()
    });
    list_layers(map, |layer| {
        let is_linear = match &numbers {
            Some(numbers) => numbers.contains(&(layer as u64 + 1)),
            None => layer == 0 || !layer.is_multiple_of(4),
        };
        match is_linear {
            true => "linear_attention",
            false => "full_attention",
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    #[test]
    fn layers_are_numbered_from_one() {
        let fields = json!({"model_type": "kimi_linear", "hidden_size": 32, "vocab_size": 64,
            "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4,
            "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2],
                "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3}});
        let Value::Object(map) = fields else {
            panic!("not an object");
        };
        let config = ModelConfig::from_map(map).unwrap();
        let recurrent = [0, 1, 2].map(|layer| config.is_recurrent(layer));
        assert_eq!(recurrent, [true, false, true]);
        assert_eq!(config.fields.get("linear_head_dim"), Some(&json!(8)));
    }
}
