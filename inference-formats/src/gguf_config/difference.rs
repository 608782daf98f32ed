//! Whether a GGUF file describes the network of a `config.json`.

use serde_json::Value;

use super::checked;
use crate::config::{ModelConfig, RopeConfig, RopeScaling};
use crate::error::Result;
use crate::family::PLAIN;
use crate::gguf::Gguf;

/// Fields of a file that [`ModelConfig`] contains in another form, or that tensors determine.
const COMPARED_OTHERWISE: [&str; 25] = [
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "rope_scaling",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_nextn_predict_layers",
    "pooling_type",
    "layer_types",
    "sliding_window",
    "num_experts",
    "num_local_experts",
    "hidden_act",
];

/// Compares the network that a file describes with the one of a `config.json`. Returns a sentence
/// about the first difference. Names, vocabularies and context lengths may differ.
///
/// # Errors
/// As [`super::config`].
pub fn difference(file: &Gguf, config: &ModelConfig) -> Result<Option<String>> {
    let (_, found) = checked(file)?;
    let family = config.family();
    let gguf = family.and_then(|family| family.gguf.as_ref());
    let gguf = gguf.unwrap_or(&PLAIN);
    if family.map(|f| f.model_type) != found.family().map(|f| f.model_type) && !gguf.is_variant {
        let read = found.model_type.unwrap_or_default();
        return Ok(Some(format!("readers of the file take it for {read}")));
    }
    let sentence = |what: &str, own: &str, read: &str| {
        let message = format!("{what} is {own}, and readers of the file take it to be {read}");
        Ok(Some(message))
    };
    let numbers = |c: &ModelConfig| {
        [
            ("hidden_size", c.hidden_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("intermediate_size", c.intermediate_size),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.num_key_value_heads),
            ("head_dim", c.head_size()),
            ("the number of experts", c.num_experts),
        ]
    };
    for ((what, own), (_, read)) in numbers(config).into_iter().zip(numbers(&found)) {
        if own != read {
            return sentence(what, &own.to_string(), &read.to_string());
        }
    }
    if config.rms_norm_eps != found.rms_norm_eps {
        let [own, read] = [config, &found].map(|c| c.rms_norm_eps.to_string());
        return sentence("the epsilon of norms", &own, &read);
    }
    for layer in 0..config.num_hidden_layers {
        let [own, read] = [config, &found].map(|c| c.window(layer));
        if own != read {
            let text = |window: Option<usize>| window.map_or("none".into(), |n| n.to_string());
            let what = format!("the sliding window of layer {layer}");
            return sentence(&what, &text(own), &text(read));
        }
        let [own, read] = [config, &found].map(|c| without_factors(c.rope_of(layer)));
        if own != read {
            let what = format!("the rotation of layer {layer}");
            return sentence(&what, &rotation(&own), &rotation(&read));
        }
    }
    let others = gguf.export.map_or(&[][..], |export| export.activations);
    if let Some(own) = &config.activation
        && *own != gguf.activation
        && !others.contains(&own.as_str())
        && !(approximates_gelu(own) && approximates_gelu(gguf.activation))
    {
        return sentence("the activation", own, gguf.activation);
    }
    let factors = gguf.export.map_or(&[][..], |export| export.factors);
    let one = Value::from(1.0);
    for (name, read) in &found.fields {
        if COMPARED_OTHERWISE.contains(&name.as_str()) {
            continue;
        }
        let missing = match factors.iter().any(|(_, field)| field == name) {
            true => &one,
            false => &Value::Null,
        };
        let own = config.fields.get(name).filter(|own| !own.is_null());
        let own = own.unwrap_or(missing);
        if !equal(own, read) {
            return sentence(name, &own.to_string(), &read.to_string());
        }
    }
    Ok(None)
}

/// The rotation, without factors that a file has in a tensor.
fn without_factors(rope: &RopeConfig) -> RopeConfig {
    let mut rope = rope.clone();
    if matches!(rope.scaling, RopeScaling::Llama3 { .. }) {
        rope.scaling = RopeScaling::None;
    }
    rope
}

/// The base and the kind of scaling, for a message.
fn rotation(rope: &RopeConfig) -> String {
    let kind = match &rope.scaling {
        RopeScaling::None => "none",
        RopeScaling::Linear { .. } => "linear",
        RopeScaling::Dynamic { .. } => "dynamic",
        RopeScaling::Llama3 { .. } => "llama3",
        RopeScaling::Yarn { .. } => "yarn",
        RopeScaling::LongRope { .. } => "longrope",
        RopeScaling::Proportional { .. } => "proportional",
    };
    let RopeConfig { theta, partial, .. } = rope;
    format!("(base {theta}, scaling {kind}, {partial} of the head)")
}

/// Whether an activation is the tanh approximation of GELU, which has several names.
fn approximates_gelu(activation: &str) -> bool {
    ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"].contains(&activation)
}

/// Whether a field means the same as a missing one: it is null, false, zero or empty.
pub fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        value => value.as_f64() == Some(0.0),
    }
}

/// Whether two fields have one meaning.
fn equal(own: &Value, read: &Value) -> bool {
    match (own.as_f64(), read.as_f64()) {
        // Files have floats of 32 bits.
        (Some(own), Some(read)) => own as f32 == read as f32,
        _ => own == read || (is_unset(own) && is_unset(read)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_missing_field_is_none_false_zero_or_empty() {
        for (own, read) in [
            (json!(null), json!(false)),
            (json!(0), json!(null)),
            (json!([]), json!(null)),
            (json!(1), json!(1.0)),
            (json!(0.1), json!(0.1f32)),
            (json!("silu"), json!("silu")),
            (json!([1, 2]), json!([1, 2])),
        ] {
            assert!(equal(&own, &read), "{own} {read}");
        }
        for (own, read) in [
            (json!(null), json!(true)),
            (json!(50.0), json!(null)),
            (json!(1), json!(2)),
            (json!("silu"), json!("gelu")),
            (json!([1, 2]), json!([1])),
        ] {
            assert!(!equal(&own, &read), "{own} {read}");
        }
    }
}
