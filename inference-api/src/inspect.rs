//! Inspection of a model's activations and weights: attention, hidden states, residual streams.

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::Result;
use crate::message::Prompt;

/// Keys of each layer after one pass over a prompt, and queries if the backend reports them. Rotary
/// position embeddings (RoPE) are applied.
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
    /// Number of key heads. It is smaller than `num_heads` if groups of query heads share a key
    /// head. Layers may differ: the length of a layer's list is the layer's own number of heads.
    pub num_kv_heads: usize,
    /// Number of positions.
    pub seq_len: usize,
    /// Elements per head. Layers may differ: each vector has `seq_len * head_dim` elements with the
    /// layer's own `head_dim`.
    pub head_dim: usize,
    /// `[layer][kv_head]`, each `seq_len * head_dim` row-major. A layer that shares another layer's
    /// keys has a copy of these keys; a layer without attention has an empty list.
    pub keys: Vec<Vec<Vec<f32>>>,
    /// `[layer][head]`, each `seq_len * head_dim` row-major. A layer without attention has an empty
    /// list.
    pub queries: Option<Vec<Vec<Vec<f32>>>>,
}

/// The output of every block at some positions of a prompt.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HiddenStates {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The requested positions.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The input of the first block, `positions * hidden_size` row-major. Empty if the backend does
    /// not report it.
    pub embedding: Vec<f32>,
    /// `[block]`, each `positions * hidden_size` row-major.
    pub blocks: Vec<Vec<f32>>,
}

/// The contributions of a model's parts to the residual stream at some positions of a prompt.
///
/// All lists are `positions * hidden_size`, row-major. A part includes its norms, scales and gates.
/// For each layer `l`, up to float32 rounding, `residual[l] = residual[l - 1] + mixer[l] +
/// feed_forward[l]`; the embedding precedes layer 0.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResidualTrace {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The requested positions.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The input of the first block.
    pub embedding: Vec<f32>,
    /// The blocks, first to last.
    pub layers: Vec<LayerTrace>,
}

/// The contributions of one block to the residual stream; see [`ResidualTrace`].
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerTrace {
    /// The contribution of attention or of a recurrent layer.
    pub mixer: Vec<f32>,
    /// The contribution of the rest of the block.
    pub feed_forward: Vec<f32>,
    /// The residual stream after the block.
    pub residual: Vec<f32>,
}

impl ResidualTrace {
    /// The residual stream between the mixer and the feed-forward part of a layer. `None` for an
    /// unknown layer.
    #[must_use]
    pub fn between(&self, layer: usize) -> Option<Vec<f32>> {
        let traced = self.layers.get(layer)?;
        let before = match layer.checked_sub(1) {
            None => &self.embedding,
            Some(earlier) => &self.layers.get(earlier)?.residual,
        };
        Some(
            before
                .iter()
                .zip(&traced.mixer)
                .map(|(x, d)| x + d)
                .collect(),
        )
    }
}

/// The attention weights of a prompt's last token.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionWeights {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The requested layers that have attention.
    pub layers: Vec<usize>,
    /// `[layer][head]`, each with one weight per position. The sum of the weights is 1, or less if
    /// an attention sink takes a share.
    pub weights: Vec<Vec<Vec<f32>>>,
}

/// The input of each layer's feed-forward part at some positions of a prompt: the residual stream
/// after the norm before that part.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedForwardInputs {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The requested positions.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// `[layer]`, each `positions * hidden_size` row-major; empty for a layer without a
    /// feed-forward part.
    pub layers: Vec<Vec<f32>>,
}

/// The activations of each layer's feed-forward features at some positions of a prompt: the input
/// of the down matrix, `act(gate(x)) * up(x)`, or `act(up(x))` without a gate. In a layer that
/// computes only some features, the others are 0.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedForwardActivations {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The requested positions.
    pub positions: Vec<usize>,
    /// `[layer]`, each `positions * features` row-major; empty for layers with experts and for
    /// layers without a feed-forward part.
    pub layers: Vec<Vec<f32>>,
}

/// The feed-forward part of a layer, feature by feature. Matrices are `[features, hidden_size]`,
/// row-major, with the values that the backend computes with.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedForwardWeights {
    /// The inner width.
    pub features: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The activation of the gate, or of the up matrix where there is no gate: `silu`, `gelu`,
    /// `gelu_tanh`, `relu` or `relu2`.
    pub activation: String,
    /// The rows of the gate matrix. Without a gate, the rows of the up matrix.
    pub gate: Vec<f32>,
    /// The rows of the up matrix; `None` without a gate.
    pub up: Option<Vec<f32>>,
    /// The columns of the down matrix.
    pub down: Vec<f32>,
    /// The gate's bias, `[features]`.
    pub gate_bias: Option<Vec<f32>>,
    /// The up matrix's bias, `[features]`.
    pub up_bias: Option<Vec<f32>>,
    /// The output's bias, `[hidden_size]`; with experts, `[experts, hidden_size]`.
    pub down_bias: Option<Vec<f32>>,
    /// Number of experts, if the layer has experts. Features are listed expert by expert. The
    /// number includes only experts that the router can choose, not a shared expert.
    pub experts: Option<usize>,
}

/// The matrices of a layer's attention, as flat lists of rows, or of columns for the output matrix.
/// The values are those that the backend computes with.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionProjections {
    /// Query heads.
    pub num_heads: usize,
    /// Key heads; groups of query heads share one.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// The rows of the query matrix, `[num_heads * head_dim, hidden_size]`.
    pub queries: Vec<f32>,
    /// The rows of the key matrix, `[num_kv_heads * head_dim, hidden_size]`.
    pub keys: Vec<f32>,
    /// The rows of the value matrix, `[num_kv_heads * head_dim, hidden_size]`.
    pub values: Vec<f32>,
    /// The columns of the output matrix, `[num_heads * head_dim, hidden_size]`.
    pub outputs: Vec<f32>,
}

/// A model whose attention and hidden states can be inspected.
pub trait AttentionInspector: TextModel {
    /// Runs the prompt once and returns keys and queries of its attention. Engines check
    /// `interrupt` between the steps of a prompt.
    ///
    /// # Errors
    /// As [`TextModel::generate`] and [`Interrupt::check`].
    fn inspect_attention(
        &self,
        prompt: &Prompt,
        interrupt: &Interrupt,
    ) -> Result<AttentionSnapshot>;

    /// Runs the prompt once and returns the output of every block at `positions`.
    ///
    /// # Errors
    /// As [`AttentionInspector::inspect_attention`]; [`crate::ErrorKind::InvalidOption`] for
    /// positions beyond the prompt; [`crate::ErrorKind::Unsupported`] if the backend cannot report
    /// hidden states.
    fn hidden_states(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<HiddenStates> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show hidden states",
        ))
    }

    /// [`AttentionInspector::hidden_states`] for several prompts, each with its own list of
    /// positions. Engines may run several prompts in one pass. This default runs the prompts one by
    /// one.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states`], for any of the prompts, and
    /// [`crate::ErrorKind::InvalidOption`] when the two lists differ in length.
    fn hidden_states_many(
        &self,
        prompts: &[Prompt],
        positions: &[Vec<usize>],
        interrupt: &Interrupt,
    ) -> Result<Vec<HiddenStates>> {
        check_lists(prompts, positions)?;
        prompts
            .iter()
            .zip(positions)
            .map(|(prompt, positions)| self.hidden_states(prompt, positions, interrupt))
            .collect()
    }

    /// Returns the contribution of each part of the model to the residual stream at `positions` of
    /// a prompt. `interrupt` can end the computation.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states`].
    fn trace_residuals(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<ResidualTrace> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the outputs of a block's parts",
        ))
    }

    /// Returns the attention weights of the prompt's last token in `layers`, or in all layers.
    /// Score caps, sliding windows and attention sinks affect the weights. A sink has no entry of
    /// its own, so a head's weights may sum to less than 1. `interrupt` can end the computation.
    ///
    /// # Errors
    /// The errors of [`AttentionInspector::inspect_attention`], and
    /// [`crate::ErrorKind::InvalidOption`] for an unknown layer.
    fn attention_weights(
        &self,
        prompt: &Prompt,
        layers: Option<&[usize]>,
        interrupt: &Interrupt,
    ) -> Result<AttentionWeights> {
        let _ = (prompt, layers, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show attention weights",
        ))
    }

    /// The input of each layer's feed-forward part at `positions` of a prompt. `interrupt` can end
    /// the computation.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states`].
    fn feed_forward_inputs(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<FeedForwardInputs> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the inputs of feed-forward parts",
        ))
    }

    /// The activations of each layer's feed-forward features at `positions` of a prompt.
    /// `interrupt` can end the computation.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states`]. [`crate::ErrorKind::Unsupported`] also for a
    /// layer whose implementation does not report them.
    fn feed_forward_activations(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<FeedForwardActivations> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the activations of feed-forward parts",
        ))
    }

    /// The feed-forward part of a layer, feature by feature.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for an unknown layer, and
    /// [`crate::ErrorKind::Unsupported`] for a layer without separate features, or if the backend
    /// cannot report the weights.
    fn feed_forward_weights(&self, layer: usize) -> Result<FeedForwardWeights> {
        let _ = layer;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the weights of feed-forward parts",
        ))
    }

    /// The matrices of a layer's attention.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for an unknown layer. [`crate::ErrorKind::Unsupported`]
    /// for a layer without plain attention, for a layer that shares another layer's keys, or if the
    /// backend cannot report the matrices.
    fn attention_projections(&self, layer: usize) -> Result<AttentionProjections> {
        let _ = layer;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the matrices of attention",
        ))
    }

    /// The embeddings of tokens, `[tokens, hidden_size]` row-major, as stored in the table.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for a token outside the vocabulary, and
    /// [`crate::ErrorKind::Unsupported`] if the backend cannot report embeddings.
    fn token_embeddings(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let _ = tokens;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show embeddings of tokens",
        ))
    }

    /// The dot products of `vectors` with all token embeddings, as stored. `vectors` is `[vectors,
    /// hidden_size]`, row-major. Returns one list of `vocab_size` values per vector.
    ///
    /// # Errors
    /// As [`AttentionInspector::unembed`].
    fn token_scores(&self, vectors: &[f32]) -> Result<Vec<Vec<f32>>> {
        let _ = vectors;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend cannot multiply vectors with token embeddings",
        ))
    }

    /// Applies the model's last norm and head to hidden states `[states, hidden_size]`, row-major.
    /// Returns one list of `vocab_size` logits per state. For the last block's output, these are
    /// the model's own logits. For an earlier block's output, they are its "logit lens"
    /// (nostalgebraist, 2020).
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] if `states` is not a multiple of `hidden_size`, and
    /// [`crate::ErrorKind::Unsupported`] if the backend cannot compute them.
    fn unembed(&self, states: &[f32]) -> Result<Vec<Vec<f32>>> {
        let _ = states;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend cannot compute logits from hidden states",
        ))
    }
}

/// Checks that each prompt has a list of positions.
fn check_lists(prompts: &[Prompt], positions: &[Vec<usize>]) -> Result<()> {
    if prompts.len() == positions.len() {
        return Ok(());
    }
    Err(crate::error::Error::new(
        crate::error::ErrorKind::InvalidOption,
        format!(
            "{} prompts and positions for {}",
            prompts.len(),
            positions.len()
        ),
    ))
}
