//! Converts GGUF metadata to a [`ModelConfig`], to names of tensors, and to the parts of a
//! tokenizer.

#[cfg(test)]
mod decoder_tests;
mod difference;
#[cfg(test)]
mod further_tests;
#[cfg(test)]
mod hybrid_tests;
#[cfg(test)]
mod layer_tests;
mod names;
#[cfg(test)]
mod tests;
mod tokenizer;

use crate::error::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

pub use difference::{difference, is_unset};
pub use names::GgufNames;
pub use tokenizer::{GgufTokenizerParts, tokenizer_parts};

use super::config::ModelConfig;
use super::family::{Family, GgufFamily, GgufHeader};
use super::files::invalid;
use super::gguf::Gguf;
use super::gguf::keys::Keys;
use crate::limits;

const EMBEDDING: &str = "token_embd.weight";

/// The number of blocks that predict further tokens, after the other blocks.
const FURTHER: &str = "nextn_predict_layers";

/// Fields for the number of experts. The field name depends on the family.
const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

/// The checked configuration of a file, from its metadata and tensors.
///
/// # Errors
/// [`ErrorKind::Invalid`] if a key is missing, has the wrong type or is out of range;
/// [`ErrorKind::Unsupported`] for an unknown architecture or an unsupported feature.
pub fn config(file: &Gguf) -> Result<ModelConfig> {
    checked(file).map(|(_, config)| config)
}

/// The same configuration as the fields of a `config.json`. Some are `null`.
///
/// # Errors
/// As [`config`].
pub fn fields(file: &Gguf) -> Result<Map<String, Value>> {
    checked(file).map(|(fields, _)| fields)
}

fn checked(file: &Gguf) -> Result<(Map<String, Value>, ModelConfig)> {
    let metadata = file.metadata();
    let architecture = metadata
        .str("general.architecture")?
        .ok_or_else(|| metadata.missing("general.architecture"))?;
    let Some((family, gguf)) = Family::of_architecture(architecture) else {
        let shown: String = architecture.chars().take(60).collect();
        let families = Family::all().iter().filter_map(|f| f.gguf.as_ref());
        let mut known: Vec<_> = families
            .flat_map(|gguf| gguf.also.iter().copied().chain([gguf.architecture]))
            .collect();
        known.sort_unstable();
        known.dedup();
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "GGUF architecture {shown:?} is not supported; supported are {}",
                known.join(", ")
            ),
        )
        .with_path(file.path()));
    };
    let keys = Keys {
        metadata,
        architecture,
    };
    let fields = read(keys, file, family.model_type, gguf)?;
    let config = ModelConfig::from_map(fields.clone()).map_err(|e| e.with_path(file.path()))?;
    Ok((fields, config))
}

/// Whether a tensor belongs to a block that predicts further tokens, in a file with this
/// configuration.
pub fn predicts_further(config: &Map<String, Value>, stored: &str) -> bool {
    let number = |name: &str| config.get(name).and_then(Value::as_u64).unwrap_or(0);
    let block = stored
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
        .and_then(|(block, _)| block.parse::<u64>().ok());
    let layers = number("num_hidden_layers");
    block.is_some_and(|n| (layers..layers + number("num_nextn_predict_layers")).contains(&n))
}

/// The fields of a `config.json` for this file.
fn read(
    keys: Keys<'_>,
    file: &Gguf,
    model_type: &str,
    family: &GgufFamily,
) -> Result<Map<String, Value>> {
    let metadata = keys.metadata;
    let number = |name: &str, most: usize| match family.layers_differ {
        true => keys.of_first_layer(name, most),
        false => keys.per_layer(name, most),
    };
    let blocks = keys.required("block_count", limits::LAYERS)?;
    // The last blocks may predict further tokens. The language model does not use them.
    let further = keys
        .uint(FURTHER, 0, blocks.saturating_sub(1))?
        .filter(|n| *n > 0);
    let layers = blocks - further.unwrap_or(0);
    let hidden_size = keys.required("embedding_length", limits::HIDDEN)?;
    let (heads_key, width_key) = family.sizes;
    let heads = match family.heads_differ {
        true => keys.of_first_layer(heads_key, limits::HEADS)?,
        false => keys.per_layer(heads_key, limits::HEADS)?,
    };
    let heads = heads.ok_or_else(|| metadata.missing(&keys.key(heads_key)))?;
    let head_dim = match family {
        family if family.is_latent => None,
        family if family.narrow_values => keys.uint("attention.key_length", 2, limits::HEAD_DIM)?,
        _ => head_dim(&keys)?,
    };
    let width = head_dim.unwrap_or(hidden_size / heads);
    let rotated = keys.uint("rope.dimension_count", 1, limits::HEAD_DIM)?;
    let rotated = rotated.filter(|_| !family.is_latent);
    if rotated.is_some_and(|n| n > width || n % 2 != 0) {
        return Err(keys.wrong(
            "rope.dimension_count",
            format!("must be even and at most the head's {width}"),
        ));
    }
    let mut epsilons = [
        "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
    ];
    if family.layer_norm {
        epsilons.reverse();
    }
    let has_bias = |name: &str| file.tensors().contains_key(&format!("blk.0.{name}.bias"));
    let fields = json!({
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "intermediate_size": number(width_key, limits::INTERMEDIATE)?
            .or(keys.uint("expert_feed_forward_length", 1, limits::INTERMEDIATE)?)
            .ok_or_else(|| metadata.missing(&keys.key(width_key)))?,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", limits::HEADS)?
            .unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys
            .positive(epsilons[0])?
            // The name of the field in `config.json` determines the key, not the kind of norm.
            .or(keys.positive(epsilons[1])?)
            .ok_or_else(|| metadata.missing(&keys.key(epsilons[0])))?,
        "vocab_size": vocab_size(&keys, file)?,
        "rope_theta": keys.positive("rope.freq_base")?.unwrap_or(10_000.0),
        "partial_rotary_factor": rotated.map_or(1.0, |n| n as f64 / width as f64),
        "rope_scaling": rope_scaling(&keys, file)?,
        "max_position_embeddings": keys.uint("context_length", 1, limits::POSITIONS)?,
        "tie_word_embeddings": !file.tensors().contains_key("output.weight"),
        "attention_bias": family.optional_biases && (has_bias("attn_q") || has_bias("attn_qkv")),
        "mlp_bias": family.optional_biases && has_bias("ffn_gate"),
        "num_nextn_predict_layers": further,
        "pooling_type": keys.uint("pooling_type", 0, 4)?,
    });
    let Value::Object(mut map) = fields else {
        return Ok(Map::new());
    };
    let header = GgufHeader {
        file,
        keys,
        blocks,
        layers,
        hidden: hidden_size,
        heads,
        head_dim: width,
    };
    let mut family = family;
    if let Some((claiming, gguf)) = Family::claiming(&header)? {
        map.insert("model_type".to_owned(), claiming.model_type.into());
        family = gguf;
    }
    if let Value::Object(family_fields) = (family.read)(&header)? {
        map.extend(family_fields);
    }
    let has_experts = EXPERTS.iter().any(|name| map.contains_key(*name));
    if !has_experts && header.experts()?.is_some() {
        return Err(header.keys.unsupported(
            "expert_count",
            "a mixture of experts is not supported in this architecture",
        ));
    }
    Ok(map)
}

fn head_dim(keys: &Keys<'_>) -> Result<Option<usize>> {
    let key = keys.uint("attention.key_length", 2, limits::HEAD_DIM)?;
    let value = keys.uint("attention.value_length", 2, limits::HEAD_DIM)?;
    match (key, value) {
        (Some(k), Some(v)) if k != v => Err(keys.unsupported(
            "attention.value_length",
            format!("is {v} and key_length is {k}; only equal ones are supported"),
        )),
        _ => Ok(key.or(value)),
    }
}

/// Number of embedding rows. It must be at least the number of tokens.
fn vocab_size(keys: &Keys<'_>, file: &Gguf) -> Result<usize> {
    let Some(embedding) = file.tensors().get(EMBEDDING) else {
        return Err(invalid(
            file.path(),
            format!("there is no tensor {EMBEDDING}"),
        ));
    };
    let &[rows, _] = embedding.shape.as_slice() else {
        return Err(invalid(
            file.path(),
            format!(
                "{EMBEDDING} has {} dimensions; it must have 2",
                embedding.shape.len()
            ),
        ));
    };
    let tokens = keys
        .metadata
        .strings("tokenizer.ggml.tokens")?
        .map(<[_]>::len);
    if let Some(tokens) = tokens.filter(|n| *n > rows) {
        return Err(invalid(
            file.path(),
            format!("there are {tokens} tokens and {rows} rows in {EMBEDDING}; it needs one each"),
        ));
    }
    Ok(rows)
}

fn rope_scaling(keys: &Keys<'_>, file: &Gguf) -> Result<Value> {
    let required_factor = || {
        keys.positive("rope.scaling.factor")?
            .ok_or_else(|| keys.metadata.missing(&keys.key("rope.scaling.factor")))
    };
    let long = file.tensors().get("rope_factors_long.weight");
    if let (Some(long), Some(short)) = (long, file.tensors().get("rope_factors_short.weight")) {
        let values = |tensor: &super::gguf::GgufTensor| -> Result<Vec<f32>> {
            crate::quantization::dequantize(tensor.kind, &file.read(tensor)?)
                .ok_or_else(|| invalid(file.path(), "the rope factors are of an unknown type"))
        };
        return Ok(json!({
            "rope_type": "longrope",
            "long_factor": values(long)?,
            "short_factor": values(short)?,
            "attention_factor": keys.positive("rope.scaling.attn_factor")?,
            // A file without this key was not trained for a longer context.
            "original_max_position_embeddings": keys
                .uint("rope.scaling.original_context_length", 1, limits::POSITIONS)?
                .or(keys.uint("context_length", 1, limits::POSITIONS)?),
        }));
    }
    match keys.metadata.str(&keys.key("rope.scaling.type"))? {
        // Without a scaling type, this older key means linear scaling.
        None => Ok(match keys.positive("rope.scale_linear")? {
            Some(factor) if factor != 1.0 => json!({"rope_type": "linear", "factor": factor}),
            _ => Value::Null,
        }),
        Some("none") => Ok(Value::Null),
        Some("linear") => Ok(json!({"rope_type": "linear", "factor": required_factor()?})),
        Some("yarn") => Ok(json!({
            "rope_type": "yarn",
            "factor": required_factor()?,
            "original_max_position_embeddings":
                keys.uint("rope.scaling.original_context_length", 1, limits::POSITIONS)?,
            "beta_fast": keys.positive("rope.scaling.yarn_beta_fast")?,
            "beta_slow": keys.positive("rope.scaling.yarn_beta_slow")?,
        })),
        Some(other) => {
            let shown: String = other.chars().take(60).collect();
            Err(keys.unsupported(
                "rope.scaling.type",
                format!("{shown:?} is not supported; supported are none, linear and yarn"),
            ))
        }
    }
}
