//! Normalizes configurations: extracts the text part of multimodal configurations, renames the
//! fields of GPT-2, and adds fields that the files of a family omit ([`crate::family`]).

use crate::error::Result;
use crate::family::{Defaults, Family, fill, is_set};
use serde_json::{Map, Value, json};

use super::faults::unsupported;

/// Fields outside the text part that also apply to the text part.
const SHARED: [&str; 4] = [
    "quantization",
    "quantization_config",
    "eos_token_id",
    "tie_word_embeddings",
];

/// Field names of GPT-2 and other families, each with the usual name.
const ALIASES: [(&str, &str); 12] = [
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_positions", "max_position_embeddings"),
    ("n_inner", "intermediate_size"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("layer_norm_eps", "rms_norm_eps"),
    ("norm_epsilon", "rms_norm_eps"),
    ("norm_eps", "rms_norm_eps"),
    ("num_layers", "num_hidden_layers"),
    ("rotary_emb_base", "rope_theta"),
    ("rotary_pct", "partial_rotary_factor"),
];

/// The fields of the network, under the usual names.
pub(super) fn normalize(mut map: Map<String, Value>) -> Result<Map<String, Value>> {
    if matches!(map.get("text_config"), Some(Value::Object(_))) && !is_set(&map, "hidden_size") {
        map = text_part(map)?;
    }
    (Family::of_fields(&map).prepare)(&mut map);
    for (from, to) in ALIASES {
        if !is_set(&map, to)
            && let Some(value) = map.get(from).filter(|v| !v.is_null()).cloned()
        {
            map.insert(to.to_owned(), value);
        }
    }
    let family = Family::of_fields(&map);
    let Defaults {
        norm_eps,
        rope_theta,
        ..
    } = family.defaults;
    fill(
        &mut map,
        json!({"rms_norm_eps": norm_eps, "rope_theta": rope_theta}),
    );
    (family.complete)(&mut map);
    Ok(map)
}

fn text_part(mut map: Map<String, Value>) -> Result<Map<String, Value>> {
    let model_type = map
        .get("model_type")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !Family::of(model_type).is_some_and(|family| family.is_multimodal(model_type)) {
        let all = Family::all().iter().flat_map(|f| f.multimodal);
        let known: Vec<_> = all.copied().collect();
        return Err(unsupported(format!(
            "a multimodal configuration (text_config) is supported for {} only; use a text model",
            known.join(", ")
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
