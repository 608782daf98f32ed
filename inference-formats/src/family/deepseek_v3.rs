//! DeepSeek V3 and R1, and Kimi K2.

use serde_json::{Value, json};

use super::gguf::joined;
use super::{Defaults, Family, GgufFamily, GgufHeader, Names, Windows, fill, routed};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true}),
        );
    },
    reply: Some("deepseek_v3"),
    aliases: &["kimi_k2", "joyai_llm_flash"],
    multimodal: &["kimi_vl"],
    latent: true,
    gguf: Some(GGUF),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// GGUF files of `DeepSeek` V2 and V3 and their relatives.
pub(super) const GGUF: GgufFamily = GgufFamily {
    is_latent: true,
    optional_biases: true,
    read,
    overrides: NAMES,
    unsuffixed: routed::CHOICE_BIAS,
    ..GgufFamily::new(ARCHITECTURE)
};

/// Names of the matrices of latent attention. Old files have one matrix `attn_kv_b` instead of
/// `attn_k_b` and `attn_v_b`.
macro_rules! names {
    ($($more:expr),* $(,)?) => {
        $crate::family::routed::names!(
            ("attn_q_a", "self_attn.q_a_proj"),
            ("attn_q_a_norm", "self_attn.q_a_layernorm"),
            ("attn_q_b", "self_attn.q_b_proj"),
            ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
            ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
            ("attn_kv_b", "self_attn.kv_b_proj"),
            ("attn_k_b", "self_attn.embed_q"),
            ("attn_v_b", "self_attn.unembed_out"),
            $($more),*
        )
    };
}

pub(super) use names;

/// The names in blocks of these files.
pub(super) const NAMES: Names = names!();

/// The architecture of GGUF files of `DeepSeek` and relatives.
pub(super) const ARCHITECTURE: &str = "deepseek2";

/// Reads the fields of a GGUF file with experts.
pub(super) fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let usual = routed::Usual {
        scoring: scoring(header)?.unwrap_or("sigmoid"),
        normalized: false,
    };
    Ok(joined(latent(header)?, routed::read(header, &usual)?))
}

/// The function that turns router scores into weights; `None` without experts. Old files of V2 do
/// not contain it. For these files it is a sigmoid if the router has a bias, else a softmax.
pub(super) fn scoring(header: &GgufHeader<'_>) -> Result<Option<&'static str>> {
    if header.experts()?.is_none() {
        return Ok(None);
    }
    let assumed = match header.has("exp_probs_b.bias") {
        true => "sigmoid",
        false => "softmax",
    };
    Ok(Some(routed::scoring(header)?.unwrap_or(assumed)))
}

/// Whether queries grow with the logarithm of their position.
pub(super) fn has_growth(header: &GgufHeader<'_>) -> bool {
    let key = header.keys.key("attention.temperature_scale");
    header.keys.metadata.get(&key).is_some()
}

/// Reads the sizes of latent attention.
pub(super) fn latent(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    // In files with two matrices for keys and values, `key_length` is the width of a cached vector.
    // The sizes of a head are then under other keys.
    let size = |of_head: &str, old: &str| match keys.uint(of_head, 1, limits::HEAD_DIM)? {
        Some(size) => Ok(size),
        None => keys.required(old, limits::HEAD_DIM),
    };
    let rotated = keys.required("rope.dimension_count", limits::HEAD_DIM)?;
    let keyed = size("attention.key_length_mla", "attention.key_length")?;
    if keyed <= rotated {
        let message = format!("is {rotated}; it must be less than the width of a key, {keyed}");
        return Err(keys.wrong("rope.dimension_count", message));
    }
    let mut fields = json!({
        "num_key_value_heads": header.heads,
        "kv_lora_rank": keys.required("attention.kv_lora_rank", limits::HEAD_DIM)?,
        "q_lora_rank": match header.has("attn_q_a.weight") {
            true => Some(keys.required("attention.q_lora_rank", limits::HIDDEN)?),
            false => None,
        },
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keyed - rotated,
        "v_head_dim": size("attention.value_length_mla", "attention.value_length")?,
        "attention_bias": header.has("attn_kv_a_mqa.bias"),
    });
    if keys.metadata.str(&keys.key("rope.scaling.type"))? == Some("yarn") {
        fields["rope_scaling"] = scaling(header)?;
    }
    Ok(fields)
}

/// Reads the `YaRN` scaling. The file contains a tenth of `mscale`.
fn scaling(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let factor = keys.positive("rope.scaling.factor")?;
    let factor = factor.ok_or_else(|| keys.metadata.missing(&keys.key("rope.scaling.factor")))?;
    let weight = keys.positive("rope.scaling.yarn_log_multiplier")?;
    // The stored value is a float32. Rounding to six decimals removes its rounding error.
    let weight = weight.map(|tenth| (f64::from(tenth) * 1e7).round() / 1e6);
    Ok(json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings":
            keys.uint("rope.scaling.original_context_length", 1, limits::POSITIONS)?,
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast")?,
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow")?,
        // The published models have equal values for both, so the factor on queries and keys is 1.
        "mscale": weight,
        "mscale_all_dim": weight,
    }))
}
