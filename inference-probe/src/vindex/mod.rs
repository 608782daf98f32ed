//! A *vindex*: the feed-forward features of a model as files, so that they can be searched, read
//! feature by feature and compared without the model.
//!
//! A feature is a row of the gate matrix, which says what it answers to, a row of the up matrix,
//! and a column of the down matrix, which says what it adds (Geva et al. 2021). A vindex is a
//! directory:
//!
//! | file | what |
//! |---|---|
//! | `index.json` | sizes, and SHA-256 of every part of every file; of itself, too |
//! | `gate_vectors.bin` | for each layer the gate rows `[features, hidden]` |
//! | `up_features.bin` | the same of the up matrix, where there is a gate beside it |
//! | `down_features.bin` | for each layer the columns of the down matrix, `[features, hidden]` |
//! | `biases.bin` | for each layer that has them: gate, up, down |
//! | `down_meta.bin` | what each feature would say: its tokens with the greatest logits |
//!
//! Numbers are float32, little-endian, without headers, one layer after another. Without a gate,
//! as in GPT-2, the up matrix counts as the gate. `down_meta.bin` is `DMET`, three `u32` (version
//! 1, layers, tokens of a feature at most) and for each feature, layer by layer: `u32` the first
//! token, `f32` its logit, `u8` how many there are, and as many pairs of `u32` and `f32`.
//!
//! A directory appears under its name when it is whole. Every read compares what it reads with
//! the hashes, so that a damaged file is an error and never a wrong number.

mod layer;
mod reader;
mod writer;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

pub use layer::{Activation, Biases, Hit, Layer, Taken};
pub use reader::{MatrixFile, MatrixPart, Vindex};
pub use writer::Writer;

const VERSION: u32 = 1;
const INDEX: &str = "index.json";
const GATE: &str = "gate_vectors.bin";
const UP: &str = "up_features.bin";
const DOWN: &str = "down_features.bin";
const BIASES: &str = "biases.bin";
const META: &str = "down_meta.bin";
const META_MAGIC: &[u8; 4] = b"DMET";
const META_HEADER: u64 = 16;
/// Bytes of an index: some hundred a layer.
const MAX_INDEX: u64 = 16 << 20;
/// Sizes beyond which an index is not believed.
const MAX_LAYERS: usize = 4096;
const MAX_WIDTH: usize = 1 << 20;
/// Tokens of one feature.
const MAX_TOKENS: usize = 255;

/// The files besides the index, in the writer's order.
const FILES: [&str; 5] = [GATE, UP, DOWN, BIASES, META];

/// What a feature would say: tokens and their logits, the greatest first.
pub type Tokens = Vec<(u32, f32)>;

/// What a vindex is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    /// The model's name, for people: the same model may stand under another one.
    pub model: String,
    /// A hash that tells the model from others.
    pub identity: String,
    /// The architecture's name.
    pub family: String,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
}

impl About {
    /// Whether both are of one model, whatever it is called.
    pub fn is_same_model(&self, other: &Self) -> bool {
        (&self.identity, &self.family) == (&other.identity, &other.family)
            && (self.hidden_size, self.vocab_size) == (other.hidden_size, other.vocab_size)
    }
}

/// One layer's place and hashes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerIndex {
    /// How many features it has.
    pub num_features: usize,
    /// What they go through.
    pub activation: Activation,
    /// Whether up rows stand beside the gate's.
    pub gated: bool,
    /// Whether it has biases.
    pub biased: bool,
    /// Where its part of `down_meta.bin` begins, and its bytes.
    pub meta: (u64, u64),
    /// SHA-256 of its parts, by file.
    sha256: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    version: u32,
    about: About,
    /// Tokens of a feature in `down_meta.bin`, at most.
    down_top_k: usize,
    layers: Vec<LayerIndex>,
}

/// The file: the index, and the hash of its JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IndexFile {
    index: Index,
    sha256: String,
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

fn header(index: &Index) -> Vec<u8> {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
    let mut header = META_MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend(number(index.layers.len()));
    header.extend(number(index.down_top_k));
    header
}

fn hash_of(index: &Index) -> Result<String> {
    let json = serde_json::to_vec(index).map_err(|e| Error::data(e.to_string()))?;
    Ok(sha256(&json))
}
