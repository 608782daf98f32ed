//! GGUF metadata as the engine's own terms: the configuration and the tensors' usual names. The
//! tokenizer's parts are taken out in `tokenizer.rs`, and put together in `text/`.

mod names;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};

pub use names::tensor_name;
pub use tokenizer::{GgufTokenizerParts, tokenizer_parts};

use super::config::{ModelConfig, RopeScaling, check, limits};
use super::files::invalid;
use super::gguf::{Gguf, GgufMetadata};

/// Architectures whose metadata is understood. Mistral is stored as llama.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];
const EMBEDDING: &str = "token_embd.weight";

/// The keys of one architecture, `<architecture>.<name>`.
struct Keys<'a> {
    metadata: &'a GgufMetadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn path(&self) -> &Path {
        self.metadata.path()
    }

    fn wrong(&self, name: &str, message: impl std::fmt::Display) -> Error {
        invalid(
            self.path(),
            format!("the metadata key {} {message}", self.key(name)),
        )
    }

    fn unsupported(&self, name: &str, message: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            format!("{} {message}", self.key(name)),
        )
        .with_path(self.path())
    }

    fn uint(&self, name: &str, least: usize, most: usize) -> Result<Option<usize>> {
        match self.metadata.usize(&self.key(name))? {
            Some(n) if n < least || n > most => {
                Err(self.wrong(name, format!("is {n}; it must be from {least} to {most}")))
            }
            found => Ok(found),
        }
    }

    fn required(&self, name: &str, most: usize) -> Result<usize> {
        self.uint(name, 1, most)?
            .ok_or_else(|| self.metadata.missing(&self.key(name)))
    }

    /// A number that some files give for each layer: all must be equal.
    fn per_layer(&self, name: &str, most: usize) -> Result<Option<usize>> {
        let Some(values) = self.metadata.i32s(&self.key(name))? else {
            return Ok(None);
        };
        let Some(&first) = values.first() else {
            return Err(self.wrong(name, "is empty"));
        };
        if values.iter().any(|&v| v != first) {
            return Err(self.unsupported(name, "differs between layers, which is not supported"));
        }
        match usize::try_from(first) {
            Ok(n) if (1..=most).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(name, format!("is {first}; it must be from 1 to {most}"))),
        }
    }

    fn positive(&self, name: &str) -> Result<Option<f32>> {
        match self.metadata.f32(&self.key(name))? {
            Some(f) if !(f.is_finite() && f > 0.0) => {
                Err(self.wrong(name, format!("is {f}; it must be a finite number above 0")))
            }
            found => Ok(found),
        }
    }
}

/// The configuration that a GGUF file's metadata and tensors describe, checked.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] when a key is missing, of the wrong type or out of range;
/// [`ErrorKind::Unsupported`] for another architecture or a feature this engine lacks.
pub fn config(file: &Gguf) -> Result<ModelConfig> {
    let metadata = file.metadata();
    let architecture = metadata
        .str("general.architecture")?
        .ok_or_else(|| metadata.missing("general.architecture"))?;
    if !ARCHITECTURES.contains(&architecture) {
        let shown: String = architecture.chars().take(60).collect();
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "GGUF architecture {shown:?} is not supported; supported are {}",
                ARCHITECTURES.join(", ")
            ),
        )
        .with_path(file.path()));
    }
    let config = read(
        &Keys {
            metadata,
            architecture,
        },
        file,
    )?;
    check(&config, file.path())?;
    Ok(config)
}

fn read(keys: &Keys<'_>, file: &Gguf) -> Result<ModelConfig> {
    let metadata = keys.metadata;
    if keys
        .uint("expert_count", 0, usize::MAX)?
        .is_some_and(|n| n > 0)
    {
        return Err(keys.unsupported("expert_count", "a mixture of experts is not supported"));
    }
    let hidden_size = keys.required("embedding_length", limits::HIDDEN)?;
    let heads = keys
        .per_layer("attention.head_count", limits::HEADS)?
        .ok_or_else(|| metadata.missing(&keys.key("attention.head_count")))?;
    let head_dim = head_dim(keys)?;
    let rotated = keys.uint("rope.dimension_count", 1, limits::HEAD_DIM)?;
    let width = head_dim.unwrap_or(hidden_size / heads);
    if rotated.is_some_and(|n| n != width) {
        return Err(keys.unsupported(
            "rope.dimension_count",
            format!("is not the head's {width}: rotating a part of each head is not supported"),
        ));
    }
    let positions = keys.uint("context_length", 1, limits::POSITIONS)?;
    let has_bias = |name: &str| file.tensors().contains_key(&format!("blk.0.{name}.bias"));
    Ok(ModelConfig {
        model_type: Some(keys.architecture.to_owned()),
        hidden_size,
        num_hidden_layers: keys.required("block_count", limits::LAYERS)?,
        intermediate_size: keys
            .per_layer("feed_forward_length", limits::INTERMEDIATE)?
            .ok_or_else(|| metadata.missing(&keys.key("feed_forward_length")))?,
        num_attention_heads: heads,
        num_key_value_heads: keys
            .per_layer("attention.head_count_kv", limits::HEADS)?
            .unwrap_or(heads),
        head_dim,
        rms_norm_eps: keys
            .positive("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| metadata.missing(&keys.key("attention.layer_norm_rms_epsilon")))?,
        vocab_size: vocab_size(keys, file)?,
        rope_theta: keys.positive("rope.freq_base")?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(keys)?,
        // Rows are un-permuted when they are loaded, so halves are rotated as everywhere.
        rope_traditional: false,
        max_position_embeddings: positions,
        tie_word_embeddings: Some(!file.tensors().contains_key("output.weight")),
        // For the others the architecture itself says it.
        attention_bias: keys.architecture != "qwen2" && has_bias("attn_q"),
        mlp_bias: has_bias("ffn_gate"),
        // ggml's llama uses no window, whatever the metadata says.
        sliding_window: None,
        // The tokenizer knows them.
        eos_token_ids: Vec::new(),
        quantization: None,
        quantization_overrides: BTreeMap::new(),
    })
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

/// Rows of the embedding, which the token list may not exceed.
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

fn rope_scaling(keys: &Keys<'_>) -> Result<RopeScaling> {
    let required_factor = || {
        keys.positive("rope.scaling.factor")?
            .ok_or_else(|| keys.metadata.missing(&keys.key("rope.scaling.factor")))
    };
    match keys.metadata.str(&keys.key("rope.scaling.type"))? {
        // An older key for the same as `linear`.
        None => Ok(match keys.positive("rope.scale_linear")? {
            Some(factor) if factor != 1.0 => RopeScaling::Linear { factor },
            _ => RopeScaling::None,
        }),
        Some("none") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: required_factor()?,
        }),
        Some(other) => {
            let shown: String = other.chars().take(60).collect();
            Err(keys.unsupported(
                "rope.scaling.type",
                format!("{shown:?} is not supported; supported are none and linear"),
            ))
        }
    }
}
