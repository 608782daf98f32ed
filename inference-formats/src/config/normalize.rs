//! Makes different spellings one: the text part of multimodal configurations, the names of GPT-2,
//! and the defaults that families leave out.

use crate::error::Result;
use serde_json::{Map, Value, json};

use super::unsupported;

/// Families whose multimodal configurations have a text part that can be loaded by itself.
const WITH_TEXT_PART: [&str; 2] = ["gemma3", "gemma4"];

/// Fields beside the text part that apply to it.
const SHARED: [&str; 4] = [
    "quantization",
    "quantization_config",
    "eos_token_id",
    "tie_word_embeddings",
];

/// Names of GPT-2 and others, and the usual ones.
const ALIASES: [(&str, &str); 8] = [
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_positions", "max_position_embeddings"),
    ("n_inner", "intermediate_size"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("layer_norm_eps", "rms_norm_eps"),
    ("norm_epsilon", "rms_norm_eps"),
];

/// The fields of the network, under the usual names.
pub(super) fn normalize(mut map: Map<String, Value>) -> Result<Map<String, Value>> {
    if matches!(map.get("text_config"), Some(Value::Object(_))) && !is_set(&map, "hidden_size") {
        map = text_part(map)?;
    }
    for (from, to) in ALIASES {
        if !is_set(&map, to)
            && let Some(value) = map.get(from).filter(|v| !v.is_null()).cloned()
        {
            map.insert(to.to_owned(), value);
        }
    }
    let model_type = map
        .get("model_type")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    if let Value::Object(defaults) = defaults(&model_type) {
        for (name, value) in defaults {
            if !is_set(&map, &name) {
                map.insert(name, value);
            }
        }
    }
    match model_type.as_str() {
        // A null means that there is no window, so only a missing field has the default.
        "exaone4" => {
            map.entry("sliding_window").or_insert(json!(4096));
        }
        // Sliding layers have the base of the full ones, but not their scaling.
        "olmo3" if !is_set(&map, "rope_local_base_freq") => {
            let own = map.get("rope_parameters").and_then(|p| p.get("rope_theta"));
            if let Some(base) = own.or(map.get("rope_theta")).cloned() {
                map.insert("rope_local_base_freq".into(), base);
            }
        }
        _ => {}
    }
    // GPT-2 defines this width by a rule.
    if model_type == "gpt2"
        && !is_set(&map, "intermediate_size")
        && let Some(width) = map.get("hidden_size").and_then(Value::as_u64)
    {
        map.insert("intermediate_size".into(), json!(width.saturating_mul(4)));
    }
    Ok(map)
}

fn is_set(map: &Map<String, Value>, name: &str) -> bool {
    map.get(name).is_some_and(|v| !v.is_null())
}

fn text_part(mut map: Map<String, Value>) -> Result<Map<String, Value>> {
    let model_type = map
        .get("model_type")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !WITH_TEXT_PART.contains(&model_type) {
        return Err(unsupported(format!(
            "a multimodal configuration (text_config) is supported for {} only; use a text model",
            WITH_TEXT_PART.join(" and ")
        )));
    }
    let outer_type = Value::String(model_type.to_owned());
    let Some(Value::Object(mut text)) = map.remove("text_config") else {
        return Ok(map);
    };
    for name in SHARED {
        if let Some(value) = map.remove(name).filter(|v| !v.is_null()) {
            text.insert(name.to_owned(), value);
        }
    }
    if !is_set(&text, "vocab_size")
        && let Some(value) = map.remove("vocab_size")
    {
        text.insert("vocab_size".to_owned(), value);
    }
    text.insert("model_type".to_owned(), outer_type);
    Ok(text)
}

/// The defaults of a family, as its reference implementation has them.
fn defaults(model_type: &str) -> Value {
    match model_type {
        "gemma" => json!({"head_dim": 256, "rms_norm_eps": 1e-6}),
        "gemma2" => json!({"head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0}),
        "gemma3" | "gemma3_text" => json!({"num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "rms_norm_eps": 1e-6, "vocab_size": 262_208, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096}),
        "gemma4" | "gemma4_text" => json!({"num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "rms_norm_eps": 1e-6, "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        "cohere2" => json!({"rms_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096}),
        "exaone4" => json!({"rms_norm_eps": 1e-5}),
        "olmo3" => json!({"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}),
        "phi3" => json!({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
        "starcoder2" | "gpt2" => json!({"rms_norm_eps": 1e-5}),
        "glm4" => json!({"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
            "attention_bias": false}),
        "gpt_oss" => json!({"rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128,
            "rope_theta": 150_000.0}),
        "mixtral" => json!({"num_local_experts": 8, "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
        "qwen2_moe" => json!({"decoder_sparse_step": 1}),
        _ => json!({}),
    }
}
