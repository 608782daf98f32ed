//! The configuration of a network: `config.json` as transformers and mlx-lm write it.
//! [`crate::gguf_config`] converts GGUF metadata to the same [`ModelConfig`]. This module reads no
//! weights; an engine checks shapes when it loads weights.

mod faults;
mod fields;
mod layers;
mod normalize;
mod packing;
mod quant_format;
mod quantization;
mod rope;
#[cfg(test)]
mod tests;
mod validate;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::error::Result;
use crate::family::Family;
use crate::python_json;
use serde_json::{Map, Value};

pub use layers::LayerKind;
pub use packing::Packing;
pub use quant_format::QuantConfig;
pub use rope::{RopeConfig, RopeScaling, llama3_stretch};

use super::files::read_capped;
use faults::{fault, unsupported};
use fields::{Fault, Fields};

/// Maximum size of a `config.json` in bytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

pub use crate::limits;

/// The parameters of a decoder-only network. Fields have their names in `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture's name; `None` if the file does not contain it.
    pub model_type: Option<String>,
    /// Width of the residual stream, in elements.
    pub hidden_size: usize,
    /// Number of decoder blocks.
    pub num_hidden_layers: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head in elements; `None` if the file does not contain it.
    pub head_dim: Option<usize>,
    /// Epsilon of the norms, added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Rotary position embeddings (RoPE) of full-attention layers. Sliding layers use them, too,
    /// unless `rope_sliding` is set.
    pub rope: RopeConfig,
    /// Rotary position embeddings of sliding layers, if they differ.
    pub rope_sliding: Option<RopeConfig>,
    /// Whether the rotation pairs adjacent elements. Otherwise it pairs elements of the two halves
    /// of a head.
    pub rope_traditional: bool,
    /// Context length for which the model was trained, in positions.
    pub max_position_embeddings: Option<usize>,
    /// Whether the output matrix is the embedding matrix. `None` means that it is, if the file has
    /// no separate tensor for the output matrix.
    pub tie_word_embeddings: Option<bool>,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Whether the feed-forward block has biases.
    pub mlp_bias: bool,
    /// Number of positions that a query of a sliding layer attends to; `None` means all. A window
    /// that the file contains but disables is also `None`.
    pub sliding_window: Option<usize>,
    /// The kind of each layer.
    pub layer_kinds: Vec<LayerKind>,
    /// The activation of the feed-forward block, as the file names it.
    pub activation: Option<String>,
    /// Number of experts in each mixture, for estimates of memory; 0 for dense networks.
    pub num_experts: usize,
    /// Tokens that end a reply.
    pub eos_token_ids: Vec<u32>,
    /// The quantization of matrices. `None` for dense models. Also `None` for GGUF files, where
    /// each tensor has its own type.
    pub quantization: Option<QuantConfig>,
    /// Exceptions from `quantization`, by layer name, such as `model.layers.3.mlp.down_proj`. The
    /// value `None` means a dense layer.
    pub quantization_overrides: BTreeMap<String, Option<QuantConfig>>,
    /// The layout of quantized matrices in safetensors files. `quantization` is the format in
    /// memory.
    pub packing: Packing,
    /// All fields of the file, for the fields that only one architecture has. Read them with
    /// [`Self::uint`] and the other getters.
    pub fields: Map<String, Value>,
}

/// Parses the JSON object in `bytes`.
fn object(bytes: &[u8]) -> Result<serde_json::Map<String, Value>> {
    match python_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(fault("the file is not a JSON object".into())),
        Err(e) => Err(fault("not valid JSON".into()).with_source(e)),
    }
}

impl ModelConfig {
    /// Whether GPTQ sorted the inputs of each matrix by importance before it grouped them, so that
    /// a group's inputs are not neighbors.
    pub fn has_ordered_groups(&self) -> bool {
        let field = |name: &str| self.fields.get("quantization_config")?.get(name);
        matches!(self.packing, Packing::Gptq { .. })
            && field("desc_act") == Some(&Value::Bool(true))
    }

    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) if there is no file;
    /// [`Invalid`](crate::ErrorKind::Invalid) if the file is too large, is not JSON, or has
    /// impossible values; [`Unsupported`](crate::ErrorKind::Unsupported) if it requires an
    /// unsupported feature. The message names the field.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_CONFIG_BYTES)?;
        Self::from_json(&bytes).map_err(|e| e.with_path(path))
    }

    /// Like [`Self::from_file`], from the content of the file.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        Self::from_map(object(bytes)?)
    }

    /// Like [`Self::from_file`], from the parsed fields of the file.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_map(map: Map<String, Value>) -> Result<Self> {
        let map = normalize::normalize(map)?;
        let fields = Fields::new(&map);
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
        let quantization = quantization::parse(&fields).map_err(feature)?;
        let mut config = Self::plain(&fields, rope, max_position_embeddings).map_err(fault)?;
        config.quantization = quantization.default;
        config.quantization_overrides = quantization.overrides;
        config.packing = quantization.packing;
        (config.sliding_window, config.layer_kinds) =
            layers::parse(&fields, Family::of_fields(&map), config.num_hidden_layers)?;
        config.fields = map;
        config.validate()?;
        Ok(config)
    }

    /// Reads all values that depend on a single field.
    fn plain(fields: &Fields<'_>, rope: rope::Ropes, positions: Option<usize>) -> Fault<Self> {
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
            rms_norm_eps: fields.required_positive("rms_norm_eps")?,
            vocab_size: fields.required_uint("vocab_size", 1..=limits::VOCAB)?,
            rope: rope.full,
            rope_sliding: rope.sliding,
            rope_traditional: fields.bool("rope_traditional")?.unwrap_or(false),
            max_position_embeddings: positions,
            tie_word_embeddings: fields.bool("tie_word_embeddings")?,
            attention_bias: fields.bool("attention_bias")?.unwrap_or(false),
            mlp_bias: fields.bool("mlp_bias")?.unwrap_or(false),
            sliding_window: None,
            layer_kinds: Vec::new(),
            activation: activation(fields)?,
            num_experts: experts(fields)?,
            eos_token_ids: fields.token_ids("eos_token_id")?,
            quantization: None,
            quantization_overrides: BTreeMap::new(),
            packing: Packing::Mlx,
            fields: Map::new(),
        })
    }

    /// The family of the model; `None` if the family is unknown or the file does not name one.
    pub fn family(&self) -> Option<&'static Family> {
        self.model_type.as_deref().and_then(Family::of)
    }

    /// Width of a head in elements. If the configuration does not contain it, it is computed.
    pub fn head_size(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// The window of a layer in positions; `None` for a layer without one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        match self.layer_kinds.get(layer) {
            Some(LayerKind::Sliding) => self.sliding_window,
            _ => None,
        }
    }

    /// Whether a layer is a sliding layer, even if the model has no window.
    pub fn slides(&self, layer: usize) -> bool {
        self.layer_kinds.get(layer) == Some(&LayerKind::Sliding)
    }

    /// Whether a layer has a recurrent state of fixed size instead of keys and values.
    pub fn is_recurrent(&self, layer: usize) -> bool {
        self.layer_kinds.get(layer) == Some(&LayerKind::Recurrent)
    }

    /// Whether a layer has a KV cache.
    pub fn has_keys(&self, layer: usize) -> bool {
        matches!(
            self.layer_kinds.get(layer),
            Some(LayerKind::Full | LayerKind::Sliding)
        )
    }

    /// The rotary position embeddings of a layer.
    pub fn rope_of(&self, layer: usize) -> &RopeConfig {
        match &self.rope_sliding {
            Some(sliding) if self.slides(layer) => sliding,
            _ => &self.rope,
        }
    }

    /// An integer in `range`, from a field of a specific architecture. `None` if the field is
    /// missing.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) if the field has another value.
    pub fn uint(&self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        Fields::new(&self.fields).uint(name, range).map_err(fault)
    }

    /// As [`Self::uint`], for a required field.
    ///
    /// # Errors
    /// As [`Self::uint`], and if the field is missing.
    pub fn required_uint(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize> {
        Fields::new(&self.fields)
            .required_uint(name, range)
            .map_err(fault)
    }

    /// A finite number, from a field of a specific architecture.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) if the field has another value.
    pub fn number(&self, name: &str) -> Result<Option<f32>> {
        Fields::new(&self.fields).number(name).map_err(fault)
    }

    /// A Boolean, from a field of a specific architecture.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) if the field is neither true nor false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        Fields::new(&self.fields).bool(name).map_err(fault)
    }

    /// A list of finite numbers, from a field of a specific architecture.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) if the field has another value.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>> {
        Fields::new(&self.fields).numbers(name).map_err(fault)
    }
}

/// The activation's name. Gemma has two fields for it; the newer one takes precedence.
fn activation(fields: &Fields<'_>) -> Fault<Option<String>> {
    for name in ["hidden_activation", "hidden_act", "activation_function"] {
        if let Some(activation) = fields.str(name)? {
            return Ok(Some(activation.to_owned()));
        }
    }
    Ok(None)
}

/// Number of experts in each mixture. Each family has another name for this field.
fn experts(fields: &Fields<'_>) -> Fault<usize> {
    for name in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if let Some(n) = fields.uint(name, 0..=limits::EXPERTS)? {
            return Ok(n);
        }
    }
    Ok(0)
}

/// The token ids of the field `key`: one id, a list, or none. A negative id means that there is
/// none.
///
/// # Errors
/// A message with field and value if the field has another value.
pub fn token_ids(key: &str, value: Option<&Value>) -> Fault<Vec<u32>> {
    fields::token_ids(key, value.filter(|v| !v.is_null()))
}
