//! Kimi Linear.

use serde_json::{Map, Value, json};

use super::gguf::{GgufChange, joined};
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, deepseek_v3, fill, is_set,
    list_layers, rename, routed,
};
use crate::error::Result;
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
    gguf: Some(GgufFamily {
        layers_differ: true,
        is_latent: true,
        read,
        write,
        changes: &[
            // GGUF files store the rate. Directories store `ln(-rate)`.
            (
                ".self_attn.rates",
                GgufChange::NegatedExponentials(".self_attn.A_log"),
            ),
            ("_conv1d.weight", GgufChange::Convolution),
        ],
        overrides: deepseek_v3::names!(
            ("ssm_conv1d_q", "self_attn.q_conv1d"),
            ("ssm_conv1d_k", "self_attn.k_conv1d"),
            ("ssm_conv1d_v", "self_attn.v_conv1d"),
            ("ssm_f_a", "self_attn.f_a_proj"),
            ("ssm_f_b", "self_attn.f_b_proj"),
            ("ssm_g_a", "self_attn.g_a_proj"),
            ("ssm_g_b", "self_attn.g_b_proj"),
            ("ssm_beta", "self_attn.b_proj"),
            ("ssm_norm", "self_attn.o_norm"),
        ),
        unsuffixed: &[
            ("ssm_a", "self_attn.rates"),
            ("ssm_dt.bias", "self_attn.dt_bias"),
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ],
        ..GgufFamily::new("kimi-linear")
    }),
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

/// Reads the object `linear_attn_config`. The object has the sizes of linear layers, and the
/// indices of the layers of each kind, counted from 1.
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
    let experts = ["num_experts", "num_local_experts", "n_routed_experts"];
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

/// Reads the fields of a GGUF file. A layer with key heads has latent attention. Files do not state
/// the number of heads of the other layers; the tensors show it.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let heads = header.by_layer("attention.head_count_kv", (0, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let kind = |n: &usize| match n {
        0 => "linear_attention",
        _ => "full_attention",
    };
    let linear_heads = (0..header.layers).find_map(|layer| {
        let rates = header.file.tensors().get(&format!("blk.{layer}.ssm_a"))?;
        Some(rates.shape.iter().product::<usize>())
    });
    let own = json!({
        "layer_types": heads.iter().map(kind).collect::<Vec<_>>(),
        "linear_num_heads": linear_heads.unwrap_or(header.heads),
        "linear_head_dim": keys.required("kda.head_dim", limits::HEAD_DIM)?,
        "linear_conv_kernel_dim": keys.required("ssm.conv_kernel", limits::HIDDEN)?,
    });
    let latent = joined(deepseek_v3::latent(header)?, own);
    Ok(joined(
        latent,
        routed::read(header, &routed::NORMALIZED_SIGMOIDS)?,
    ))
}

/// Adds the fields of transformers and mlx-lm: an object for linear layers, with indices counted
/// from 1, and other names for the sizes of the mixture.
fn write(map: &mut Map<String, Value>) {
    let of_kind = |kind: &str| -> Vec<usize> {
        let kinds = map.get("layer_types").and_then(Value::as_array);
        let kinds = kinds.map(Vec::as_slice).unwrap_or_default();
        let numbered = (1..).zip(kinds);
        (numbered.filter(|(_, other)| *other == kind))
            .map(|(number, _)| number)
            .collect()
    };
    let value = |name: &str| map.get(name).cloned().unwrap_or_default();
    let linear = json!({
        "kda_layers": of_kind("linear_attention"),
        "full_attn_layers": of_kind("full_attention"),
        "head_dim": value("linear_head_dim"),
        "num_heads": value("linear_num_heads"),
        "short_conv_kernel_size": value("linear_conv_kernel_dim"),
    });
    map.insert("linear_attn_config".into(), linear);
    for (from, to) in [
        ("n_routed_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
        ("scoring_func", "moe_router_activation_func"),
        ("n_group", "num_expert_group"),
        ("max_position_embeddings", "model_max_length"),
    ] {
        if let Some(value) = map.get(from).cloned() {
            map.entry(to).or_insert(value);
        }
    }
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
