//! The content of `index.json` and `weight_manifest.json`, and the file sizes that follow from it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::activation::Activation;
use crate::error::{Error, Result};

/// The versions of `index.json` that can be read. Version 2 added the level (see [`Level`]),
/// further weight tensors, and other number types than float32.
pub(super) const VERSIONS: std::ops::RangeInclusive<u32> = 1..=2;
/// The version of `down_meta.bin`.
const META_VERSION: u32 = 1;
pub(super) const INDEX: &str = "index.json";
pub(super) const GATE: &str = "gate_vectors.bin";
pub(super) const UP: &str = "up_features.bin";
pub(super) const DOWN: &str = "down_features.bin";
pub(super) const BIASES: &str = "biases.bin";
pub(super) const META: &str = "down_meta.bin";
pub(super) const MANIFEST: &str = "weight_manifest.json";
const META_MAGIC: &[u8; 4] = b"DMET";
pub(super) const META_HEADER: u64 = 16;
/// The maximum size of an index or a manifest; they take some hundred bytes per layer.
pub(super) const MAX_INDEX: u64 = 64 << 20;
/// Maximum number of layers in an index.
pub(super) const MAX_LAYERS: usize = 4096;
pub(super) const MAX_WIDTH: usize = 1 << 24;
/// The maximum number of tokens of a feature.
pub(super) const MAX_TOKENS: usize = 255;

/// The files with a part for each layer, in the order of writing.
pub(super) const FILES: [&str; 5] = [GATE, UP, DOWN, BIASES, META];

/// The output of a feature: tokens and their logits, in decreasing order.
pub type Tokens = Vec<(u32, f32)>;

/// The model of a vindex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// The model's name for people. Equal models may have different names.
    pub model: String,
    /// A hash that identifies the model.
    pub identity: String,
    /// The architecture's name.
    pub family: String,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
}

impl About {
    /// Whether both are of one model, whatever its name.
    pub fn is_same_model(&self, other: &Self) -> bool {
        (&self.identity, &self.family) == (&other.identity, &other.family)
            && (self.hidden_size, self.vocab_size) == (other.hidden_size, other.vocab_size)
    }
}

/// How much of a model a vindex contains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The data for search and display: gates, and the tokens of features.
    Browse,
    /// In addition, the data with which layers can compute: all parts of each feature.
    #[default]
    Inference,
    /// In addition, all other weights.
    All,
}

impl Level {
    /// The name of the level.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Browse => "browse",
            Self::Inference => "inference",
            Self::All => "all",
        }
    }
}

impl std::str::FromStr for Level {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let all = [Self::Browse, Self::Inference, Self::All];
        let matching = all.into_iter().find(|level| level.name() == name);
        matching.ok_or_else(|| format!("`{name}` is not one of browse, inference, all"))
    }
}

/// How values are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Numbers {
    /// Single precision.
    #[default]
    Float32,
    /// Half precision, rounded to nearest.
    Float16,
}

impl Numbers {
    /// Size of a value in bytes.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Float16 => 2,
        }
    }
}

/// The experts of a layer. Their features are stored one expert after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// The number of features of each expert.
    pub features: usize,
}

/// Properties, position and hashes of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerIndex {
    /// The number of features.
    pub num_features: usize,
    /// The activation function of the features.
    pub activation: Activation,
    /// Whether there are up rows in addition to gate rows.
    pub gated: bool,
    /// Whether the layer has biases.
    pub biased: bool,
    /// The position and size of its part of `down_meta.bin`, in bytes.
    pub meta: (u64, u64),
    /// The experts among which the features are divided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// The SHA-256 of the layer's part in each file.
    pub(super) sha256: BTreeMap<String, String>,
}

/// The kind of a tensor that is not a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// Token embeddings, and learned position embeddings.
    Embedding,
    /// Attention and recurrent layers.
    Attention,
    /// Norms.
    Norm,
    /// The output head.
    Head,
    /// Routers, and experts that process all tokens (shared experts).
    Router,
}

impl TensorKind {
    /// All kinds.
    pub(super) const ALL: [Self; 5] = [
        Self::Embedding,
        Self::Attention,
        Self::Norm,
        Self::Head,
        Self::Router,
    ];

    /// The file that contains tensors of this kind.
    pub(super) fn file(self) -> &'static str {
        match self {
            Self::Embedding => "embeddings.bin",
            Self::Attention => "attn_weights.bin",
            Self::Norm => "norms.bin",
            Self::Head => "lm_head.bin",
            Self::Router => "router_weights.bin",
        }
    }
}

/// The position of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorIndex {
    /// The name in transformers.
    pub name: String,
    /// The role of the tensor.
    pub kind: TensorKind,
    /// The name of the file.
    pub file: String,
    /// The position in the file.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The lengths of its axes.
    pub shape: Vec<usize>,
    /// The type of the tensor's values.
    pub dtype: Numbers,
    pub(super) sha256: String,
}

impl TensorIndex {
    /// Number of elements; `None` if the shape is too large for any tensor.
    pub(super) fn elements(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(1u64, |n, &d| n.checked_mul(d as u64))
    }
}

/// `weight_manifest.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub tensors: Vec<TensorIndex>,
}

/// A file that is copied unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileIndex {
    pub bytes: u64,
    pub sha256: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub version: u32,
    pub about: About,
    /// The maximum number of tokens of a feature in `down_meta.bin`.
    pub down_top_k: usize,
    pub layers: Vec<LayerIndex>,
    // Omitted if the value is that of version 1, so that the hash of an old index stays valid.
    #[serde(default, skip_serializing_if = "is_default")]
    pub level: Level,
    #[serde(default, skip_serializing_if = "is_default")]
    pub dtype: Numbers,
    /// The manifest, the tokenizer and other copied files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, FileIndex>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Index {
    /// Size of a layer's part in a file, in bytes.
    pub fn part(&self, name: &str, layer: &LayerIndex) -> u64 {
        let (features, hidden) = (layer.num_features as u64, self.about.hidden_size as u64);
        let matrix = self.dtype.size() * features * hidden;
        let has_projections = self.level >= Level::Inference;
        match name {
            GATE => matrix,
            DOWN if has_projections => matrix,
            UP if layer.gated && has_projections => matrix,
            BIASES if layer.biased => {
                let up = if layer.gated { features } else { 0 };
                // Each expert has one vector of down biases.
                let outputs = layer.experts.map_or(1, |e| e.count as u64) * hidden;
                4 * (features + up + outputs)
            }
            META => layer.meta.1,
            _ => 0,
        }
    }

    pub fn size_of(&self, name: &str) -> u64 {
        let layers: u64 = self.layers.iter().map(|l| self.part(name, l)).sum();
        layers + if name == META { META_HEADER } else { 0 }
    }

    /// The position of a layer's part in a file.
    pub fn begins(&self, name: &str, number: usize) -> u64 {
        let before = self.layers.iter().take(number);
        let before: u64 = before.map(|l| self.part(name, l)).sum();
        before + if name == META { META_HEADER } else { 0 }
    }

    /// The header of `down_meta.bin`.
    pub fn header(&self) -> Vec<u8> {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        let mut header = META_MAGIC.to_vec();
        header.extend(META_VERSION.to_le_bytes());
        header.extend(number(self.layers.len()));
        header.extend(number(self.down_top_k));
        header
    }

    pub fn hash(&self) -> Result<String> {
        let json = serde_json::to_vec(self).map_err(|e| Error::data(e.to_string()))?;
        Ok(sha256(&json))
    }

    /// Checks for sizes that contradict each other, or that are impossible for a vindex.
    pub fn check(&self) -> std::result::Result<(), String> {
        let sizes = (1..=MAX_WIDTH).contains(&self.about.hidden_size)
            && self.layers.len() <= MAX_LAYERS
            && self.down_top_k <= MAX_TOKENS;
        if !sizes {
            return Err(String::from("has impossible sizes"));
        }
        let mut at = META_HEADER;
        for (i, layer) in self.layers.iter().enumerate() {
            let most = (layer.num_features as u64).saturating_mul(9 + 8 * MAX_TOKENS as u64);
            let divided = layer.experts.is_none_or(|e| {
                e.count > 0 && e.count.checked_mul(e.features) == Some(layer.num_features)
            });
            let mut wanted: Vec<&str> = FILES
                .into_iter()
                .filter(|name| self.part(name, layer) > 0)
                .collect();
            wanted.sort_unstable();
            let hashed = layer.sha256.keys().map(String::as_str).eq(wanted);
            if !(1..=MAX_WIDTH).contains(&layer.num_features)
                || !divided
                || layer.meta.0 != at
                || layer.meta.1 > most
                || !hashed
            {
                return Err(format!("layer {i} has impossible sizes, or no hashes"));
            }
            at += layer.meta.1;
        }
        Ok(())
    }
}

/// The content of `index.json`: the index, and the hash of its JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IndexFile {
    pub index: Index,
    pub sha256: String,
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}
