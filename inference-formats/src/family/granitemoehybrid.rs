//! Granite 4: layers of Mamba-2 and layers of attention. The feed-forward parts are mixtures of
//! experts or dense.

use serde_json::{Map, Value, json};

use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, granite, list_layers,
    rename, ssm,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    gguf: Some(GgufFamily {
        runs_only: true,
        permuted: true,
        layers_differ: true,
        mixture: "block_sparse_moe",
        read,
        overrides: ssm::names!(
            "mamba",
            ("ffn_gate_inp", "mlp.router.layer"),
            ("ffn_gate_shexp", "shared_mlp.gate_proj"),
            ("ffn_up_shexp", "shared_mlp.up_proj"),
            ("ffn_down_shexp", "shared_mlp.output_linear"),
        ),
        unsuffixed: ssm::vectors!("mamba"),
        ..GgufFamily::new("granitehybrid")
    }),
    reply: Some("hermes"),
    tensor_parallel: super::TensorParallel::Heads,
    joined_experts: super::JoinedExperts::GRANITE,
    ..Family::new(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. A layer with key heads is an attention layer.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let sizes = ssm::Sizes::read(header)?;
    let heads = header.by_layer("attention.head_count_kv", (0, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let kinds: Vec<&str> = (heads.iter())
        .map(|n| if *n == 0 { "mamba" } else { "attention" })
        .collect();
    // llama.cpp stores under this key whether positions are rotated.
    let rotates = keys.metadata.bool(&keys.key("rope.scaling.finetuned"))?;
    let rotates = if rotates.unwrap_or(true) {
        "rope"
    } else {
        "nope"
    };
    let experts = header.experts()?;
    let per_token = match experts {
        Some(_) => keys.required("expert_used_count", limits::EXPERTS)?,
        None => 0,
    };
    let shared = "expert_shared_feed_forward_length";
    let mut fields = granite::factors(header)?;
    let family_fields = json!({
        "layer_types": kinds,
        "position_embedding_type": rotates,
        "num_local_experts": experts.unwrap_or(0),
        "num_experts_per_tok": per_token,
        "shared_intermediate_size": keys.uint(shared, 1, limits::INTERMEDIATE)?,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.dim,
        "mamba_d_state": sizes.state,
        "mamba_n_groups": sizes.groups,
        "mamba_d_conv": sizes.conv,
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
        "mamba_proj_bias": header.has("ssm_in.bias"),
        "attention_bias": header.has_query_biases(),
    });
    if let Value::Object(family_fields) = family_fields {
        fields.extend(family_fields);
    }
    Ok(Value::Object(fields))
}

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_d_head": "auto", "mamba_proj_bias": false, "tie_word_embeddings": false}),
    );
    if map.get("mamba_d_head") == Some(&json!("auto")) {
        let number = |name: &str| map.get(name).and_then(Value::as_u64).unwrap_or(0);
        let width = number("mamba_expand").saturating_mul(number("hidden_size"));
        // Without heads, the result is null, which is later rejected as a missing width.
        let dim = width.checked_div(number("mamba_n_heads"));
        map.insert("mamba_d_head".into(), json!(dim));
    }
    rename(map, &[("layers_block_type", "layer_types")]);
    list_layers(map, |_| "mamba");
}
