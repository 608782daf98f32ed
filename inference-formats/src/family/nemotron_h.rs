//! Nemotron-H: each block has only one part.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, is_set, mamba2, rename,
    ssm,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    gguf: Some(GgufFamily {
        also: &["nemotron_h_moe"],
        runs_only: true,
        layers_differ: true,
        read,
        overrides: ssm::names!(
            "mixer",
            ("attn_norm", "norm"),
            ("attn_q", "mixer.q_proj"),
            ("attn_k", "mixer.k_proj"),
            ("attn_v", "mixer.v_proj"),
            ("attn_output", "mixer.o_proj"),
            ("ffn_up", "mixer.up_proj"),
            ("ffn_down", "mixer.down_proj"),
            ("ffn_gate_inp", "mixer.gate"),
            ("ffn_up_exps", "mixer.switch_mlp.fc1"),
            ("ffn_down_exps", "mixer.switch_mlp.fc2"),
            ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
            ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
        ),
        unsuffixed: ssm::vectors!(
            "mixer",
            ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
        ),
        global: mamba2::GLOBAL,
        prefix: "backbone.layers.",
        ..GgufFamily::new("nemotron_h")
    }),
    spare: &["mtp."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "nemotron_h",
        "NemotronHForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. A layer has either key heads, a feed-forward part, or Mamba-2.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let sizes = ssm::Sizes::read(header)?;
    let by_layer = |name: &str, most: usize| {
        header
            .by_layer(name, (0, most))?
            .ok_or_else(|| keys.metadata.missing(&keys.key(name)))
    };
    let heads = by_layer("attention.head_count_kv", limits::HEADS)?;
    let widths = by_layer("feed_forward_length", limits::INTERMEDIATE)?;
    let experts = header.experts()?;
    let fed = if experts.is_some() { "moe" } else { "mlp" };
    let kinds: Vec<&str> = (heads.iter().zip(&widths))
        .map(|of_layer| match of_layer {
            (0, 0) => "mamba",
            (0, _) => fed,
            _ => "full_attention",
        })
        .collect();
    let further = keys.uint("nextn_predict_layers", 0, limits::LAYERS)?;
    if further.is_some_and(|n| n > 0) {
        let message = "layers that predict further tokens are not supported; convert without them";
        return Err(keys.unsupported("nextn_predict_layers", message));
    }
    let mut fields = json!({
        "layer_types": kinds,
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.dim,
        "ssm_state_size": sizes.state,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.conv,
        "use_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
        "attention_bias": header.has_query_biases(),
        "mlp_bias": header.has("ffn_up.bias"),
    });
    if let Some(experts) = experts {
        let width = |name: &str| keys.required(name, limits::INTERMEDIATE);
        let normed = keys.metadata.bool(&keys.key("expert_weights_norm"))?;
        fields["n_routed_experts"] = json!(experts);
        fields["num_local_experts"] = json!(experts);
        fields["num_experts_per_tok"] = json!(keys.required("expert_used_count", limits::EXPERTS)?);
        fields["moe_intermediate_size"] = json!(width("expert_feed_forward_length")?);
        fields["n_shared_experts"] = json!(keys.uint("expert_shared_count", 0, limits::EXPERTS)?);
        fields["moe_shared_expert_intermediate_size"] =
            json!(width("expert_shared_feed_forward_length")?);
        fields["n_group"] = json!(keys.uint("expert_group_count", 0, limits::EXPERTS)?);
        fields["moe_latent_size"] = json!(keys.uint("moe_latent_size", 0, limits::HIDDEN)?);
        fields["norm_topk_prob"] = json!(normed.unwrap_or(false));
        fields["routed_scaling_factor"] = json!(keys.positive("expert_weights_scale")?);
    }
    Ok(fields)
}

fn complete(map: &mut Map<String, Value>) {
    rename(
        map,
        &[
            ("n_routed_experts", "num_local_experts"),
            ("layers_block_type", "layer_types"),
        ],
    );
    fill(
        map,
        json!({"head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "mlp_hidden_act": "relu2",
            "tie_word_embeddings": false}),
    );
    // A list of letters, or a string of them.
    let letters = match map.get("hybrid_override_pattern") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).collect(),
        _ => String::new(),
    };
    if !letters.is_empty() && !is_set(map, "layer_types") {
        let kinds: Vec<String> = letters.chars().map(kind).collect();
        map.insert("layer_types".into(), json!(kinds));
    }
    // Newer files use the same names of kinds as other families.
    if let Some(Value::Array(kinds)) = map.get_mut("layer_types") {
        for kind in kinds {
            match kind.as_str() {
                Some("linear_attention") => *kind = json!("mamba"),
                Some("attention") => *kind = json!("full_attention"),
                _ => {}
            }
        }
    }
    // The reference uses the number of kinds, whatever number the file gives.
    if let Some(Value::Array(kinds)) = map.get("layer_types") {
        map.insert("num_hidden_layers".into(), json!(kinds.len()));
    }
}

/// The kind that a letter stands for. An unknown letter is returned unchanged, and rejected later.
fn kind(letter: char) -> String {
    match letter {
        'M' => "mamba".into(),
        '*' => "full_attention".into(),
        '-' => "mlp".into(),
        'E' => "moe".into(),
        other => other.into(),
    }
}
