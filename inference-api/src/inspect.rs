//! Models whose attention can be looked at.

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::error::Result;
use crate::message::Prompt;

/// Keys, and queries where known, of every layer after one pass over a prompt, with positions
/// applied (after RoPE).
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionSnapshot {
    /// The architecture's name.
    pub architecture: String,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key heads; fewer than query heads when groups share one.
    pub num_kv_heads: usize,
    /// Positions.
    pub seq_len: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// `[layer][kv_head]`, each `seq_len * head_dim` row-major.
    pub keys: Vec<Vec<Vec<f32>>>,
    /// `[layer][head]`, each `seq_len * head_dim` row-major.
    pub queries: Option<Vec<Vec<Vec<f32>>>>,
}

/// A model that shows its attention.
pub trait AttentionInspector: TextModel {
    /// Runs the prompt once and returns what attention saw.
    ///
    /// # Errors
    /// As [`TextModel::generate`].
    fn inspect_attention(&self, prompt: &Prompt) -> Result<AttentionSnapshot>;
}
