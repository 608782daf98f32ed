//! The network's numbers, from `config.json` as transformers and mlx-lm write it. GGUF metadata
//! becomes the same [`ModelConfig`] in `gguf_config`. It reads no weights: shapes are compared with
//! the file where weights are fetched.

mod fields;
mod quantization;
mod rope;
#[cfg(test)]
mod tests;
mod validate;

use std::collections::BTreeMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use serde_json::Value;

pub use quantization::QuantConfig;
pub use rope::RopeScaling;

use super::files::{invalid, read_capped};
use fields::{Fault, Fields};

/// The largest accepted `config.json`, in bytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// The largest accepted numbers of each kind; see [`ModelConfig::validate`].
pub mod limits {
    /// `hidden_size`.
    pub const HIDDEN: usize = 1 << 17;
    /// `num_hidden_layers`.
    pub const LAYERS: usize = 1 << 12;
    /// `intermediate_size`.
    pub const INTERMEDIATE: usize = 1 << 20;
    /// `num_attention_heads` and `num_key_value_heads`.
    pub const HEADS: usize = 1 << 12;
    /// `head_dim`.
    pub const HEAD_DIM: usize = 1 << 12;
    /// `vocab_size`.
    pub const VOCAB: usize = 1 << 22;
    /// `max_position_embeddings` and `sliding_window`.
    pub const POSITIONS: usize = super::rope::MAX_POSITIONS;
}

/// The numbers of a decoder-only network. Names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture's name; `None` when the file does not say, and the weights must.
    pub model_type: Option<String>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder blocks.
    pub num_hidden_layers: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head; `None` when the file does not say.
    pub head_dim: Option<usize>,
    /// Added to the mean square before its root.
    pub rms_norm_eps: f32,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// How the rotary embedding is stretched.
    pub rope_scaling: RopeScaling,
    /// Rotates neighboring elements rather than halves.
    pub rope_traditional: bool,
    /// The context the model was made for, in positions.
    pub max_position_embeddings: Option<usize>,
    /// Whether the output matrix is the embedding; `None` leaves it to whether there is an output.
    pub tie_word_embeddings: Option<bool>,
    /// Biases on the attention's projections.
    pub attention_bias: bool,
    /// Biases in the feed-forward block.
    pub mlp_bias: bool,
    /// Positions each query looks back to, in every layer; `None` for all. Already `None` where
    /// the checkpoint has a window and does not use it.
    pub sliding_window: Option<usize>,
    /// Tokens that end a reply.
    pub eos_token_ids: Vec<u32>,
    /// How matrices are quantized; `None` for a dense model and for GGUF, where each tensor says.
    pub quantization: Option<QuantConfig>,
    /// Layers that differ from it, by name such as `model.layers.3.mlp.down_proj`; `None` is dense.
    pub quantization_overrides: BTreeMap<String, Option<QuantConfig>>,
}

/// A JSON object, with the kind of error that says what else it is.
fn object(bytes: &[u8]) -> Result<serde_json::Map<String, Value>> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(fault("the file is not a JSON object".into())),
        Err(e) => Err(fault(format!("not valid JSON: {e}")).with_source(e)),
    }
}

fn fault(message: String) -> Error {
    Error::new(ErrorKind::InvalidModel, message)
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

impl ModelConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] when the file is missing, too large, not JSON or says something
    /// impossible; [`ErrorKind::Unsupported`] when it asks for what this engine does not have. The
    /// message names the field.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_CONFIG_BYTES)?;
        Self::from_json(&bytes).map_err(|e| e.with_path(path))
    }

    /// As [`Self::from_file`], from the file's bytes.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        let map = object(bytes)?;
        let fields = Fields::new(&map);
        if fields.get("text_config").is_some() && fields.get("hidden_size").is_none() {
            return Err(unsupported(
                "a multimodal configuration (text_config) is not supported; use a text model",
            ));
        }
        let max_position_embeddings = fields
            .uint("max_position_embeddings", 1..=limits::POSITIONS)
            .map_err(fault)?;
        let feature = |f: rope::RopeFault| {
            if f.unsupported {
                unsupported(f.message)
            } else {
                fault(f.message)
            }
        };
        let rope = rope::parse(&fields, max_position_embeddings).map_err(feature)?;
        let (quantization, overrides) = quantization::parse(&fields).map_err(feature)?;
        check_features(&fields)?;
        let mut config = Self::plain(&fields, rope, max_position_embeddings).map_err(fault)?;
        config.quantization = quantization;
        config.quantization_overrides = overrides;
        config.sliding_window = sliding_window(&fields, &config)?;
        config.validate()?;
        Ok(config)
    }

    /// What is one field each.
    fn plain(fields: &Fields<'_>, rope: rope::Rope, positions: Option<usize>) -> Fault<Self> {
        let heads = fields.required_uint("num_attention_heads", 1..=limits::HEADS)?;
        Ok(Self {
            model_type: fields.str("model_type")?.map(str::to_owned),
            hidden_size: fields.required_uint("hidden_size", 1..=limits::HIDDEN)?,
            num_hidden_layers: fields.required_uint("num_hidden_layers", 1..=limits::LAYERS)?,
            intermediate_size: fields
                .required_uint("intermediate_size", 1..=limits::INTERMEDIATE)?,
            num_attention_heads: heads,
            num_key_value_heads: fields
                .uint("num_key_value_heads", 1..=limits::HEADS)?
                .unwrap_or(heads),
            head_dim: fields.uint("head_dim", 2..=limits::HEAD_DIM)?,
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6),
            vocab_size: fields.required_uint("vocab_size", 1..=limits::VOCAB)?,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            rope_traditional: fields.bool("rope_traditional")?.unwrap_or(false),
            max_position_embeddings: positions,
            tie_word_embeddings: fields.bool("tie_word_embeddings")?,
            attention_bias: fields.bool("attention_bias")?.unwrap_or(false),
            mlp_bias: fields.bool("mlp_bias")?.unwrap_or(false),
            sliding_window: None,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            quantization: None,
            quantization_overrides: BTreeMap::new(),
        })
    }
}

/// Refuses what would silently compute something else.
fn check_features(fields: &Fields<'_>) -> Result<()> {
    if let Some(act) = fields.str("hidden_act").map_err(fault)?
        && !matches!(act, "silu" | "swish")
    {
        return Err(unsupported(format!(
            "hidden_act {act:?} is not supported; supported is silu"
        )));
    }
    for field in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if fields
            .uint(field, 0..=usize::MAX)
            .map_err(fault)?
            .is_some_and(|n| n > 0)
        {
            return Err(unsupported(format!(
                "a mixture of experts ({field}) is not supported"
            )));
        }
    }
    Ok(())
}

/// The window that every layer really uses.
fn sliding_window(fields: &Fields<'_>, config: &ModelConfig) -> Result<Option<usize>> {
    let window = fields
        .uint("sliding_window", 1..=limits::POSITIONS)
        .map_err(fault)?;
    let is_qwen = config
        .model_type
        .as_deref()
        .is_some_and(|t| t.starts_with("qwen"));
    // Qwen checkpoints carry a window that is off unless said otherwise; others use what they have.
    let used = fields
        .bool("use_sliding_window")
        .map_err(fault)?
        .unwrap_or(!is_qwen);
    let Some(window) = window.filter(|_| used) else {
        return Ok(None);
    };
    let layer_types = fields.strings("layer_types").map_err(fault)?;
    let layers = config.num_hidden_layers;
    let sliding = if !layer_types.is_empty() {
        layer_types
            .iter()
            .take(layers)
            .filter(|t| *t == "sliding_attention")
            .count()
    } else if is_qwen {
        // The first `max_window_layers` layers see everything.
        let full = fields
            .uint("max_window_layers", 0..=usize::MAX)
            .map_err(fault)?;
        layers.saturating_sub(full.unwrap_or(layers))
    } else {
        layers
    };
    match sliding {
        0 => Ok(None),
        n if n == layers => Ok(Some(window)),
        n => Err(unsupported(format!(
            "a sliding window in {n} of {layers} layers is not supported; it must be all or none"
        ))),
    }
}

/// The token ids of the field `key`: one, a list, or none. A negative id stands for "none".
///
/// # Errors
/// Field and value, when it holds anything else.
pub fn token_ids(key: &str, value: Option<&Value>) -> Fault<Vec<u32>> {
    fields::token_ids(key, value.filter(|v| !v.is_null()))
}

/// For the parts of this room that have a path at hand.
pub(super) fn check(config: &ModelConfig, path: &Path) -> Result<()> {
    config.validate().map_err(|e| invalid(path, e.message()))
}
