//! Looking inside a model: attention and hidden states; and using the hidden states: embeddings.

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
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
    /// Key heads; fewer than query heads when groups share one. A model may have layers with
    /// another number: the lists say how many each has.
    pub num_kv_heads: usize,
    /// Positions.
    pub seq_len: usize,
    /// Elements per head. A model may have layers with another size: the vectors' lengths say.
    pub head_dim: usize,
    /// `[layer][kv_head]`, each `seq_len * head_dim` row-major. A layer without keys of its own has
    /// those that it looks at; one without attention has an empty list.
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
    /// The positions, as asked for.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// What the first block reads, `positions * hidden_size` row-major. Empty where the backend
    /// does not show it.
    pub embedding: Vec<f32>,
    /// `[block]`, each `positions * hidden_size` row-major.
    pub blocks: Vec<Vec<f32>>,
}

/// What the parts of a model add to the residual stream at some positions of a prompt.
///
/// All lists are `positions * hidden_size`, row-major. Norms, scales and gates of a part count as
/// its own, so that for each layer `l`, up to the rounding of float32, `residual[l] =
/// residual[l - 1] + mixer[l] + feed_forward[l]`, and the embedding stands before layer 0.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResidualTrace {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The positions, as asked for.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// What the first block reads.
    pub embedding: Vec<f32>,
    /// The blocks, first to last.
    pub layers: Vec<LayerTrace>,
}

/// What one block adds to the residual stream; see [`ResidualTrace`].
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerTrace {
    /// What attention, or a recurrent layer, adds.
    pub mixer: Vec<f32>,
    /// What the rest of the block adds.
    pub feed_forward: Vec<f32>,
    /// The residual stream after the block.
    pub residual: Vec<f32>,
}

impl ResidualTrace {
    /// The residual stream between the mixer and the feed-forward part of a layer. `None` for a
    /// layer that is not there.
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

/// How the last token of a prompt divides its attention.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionWeights {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The layers that have attention and were asked for.
    pub layers: Vec<usize>,
    /// `[layer][head]`, each a weight for every position. They add up to 1, or to less where an
    /// attention sink takes a share.
    pub weights: Vec<Vec<Vec<f32>>>,
}

/// What the feed-forward part of each layer reads at some positions of a prompt: the residual
/// stream after the norm that stands before the part.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedForwardInputs {
    /// The prompt's ids.
    pub tokens: Vec<u32>,
    /// The positions, as asked for.
    pub positions: Vec<usize>,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// `[layer]`, each `positions * hidden_size` row-major; empty for a layer without such a part.
    pub layers: Vec<Vec<f32>>,
}

/// The feed-forward part of a layer, feature by feature. Matrices are `[features, hidden_size]`,
/// row-major, in the numbers that the backend computes with.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedForwardWeights {
    /// The inner width.
    pub features: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// What the gate, or without one the up matrix, goes through: `silu`, `gelu`, `gelu_tanh`,
    /// `relu` or `relu2`.
    pub activation: String,
    /// The rows of the gate; without a gate those of the up matrix.
    pub gate: Vec<f32>,
    /// The rows of the up matrix, where there is a gate beside it.
    pub up: Option<Vec<f32>>,
    /// The columns of the down matrix.
    pub down: Vec<f32>,
    /// Of the gate, `[features]`.
    pub gate_bias: Option<Vec<f32>>,
    /// Of the up matrix, `[features]`.
    pub up_bias: Option<Vec<f32>>,
    /// Of the output, `[hidden_size]`.
    pub down_bias: Option<Vec<f32>>,
}

/// The matrices of a layer's attention, row by row, in the numbers that the backend computes with.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionProjections {
    /// Query heads.
    pub num_heads: usize,
    /// Key heads; those of queries are groups that share one.
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

/// A model that shows its attention.
pub trait AttentionInspector: TextModel {
    /// Runs the prompt once and returns what attention saw.
    ///
    /// # Errors
    /// As [`TextModel::generate`].
    fn inspect_attention(&self, prompt: &Prompt) -> Result<AttentionSnapshot>;

    /// [`AttentionInspector::inspect_attention`], unless `interrupt` ends it. Engines ask between
    /// the steps of a prompt; this one, for those that do not, asks before and after.
    ///
    /// # Errors
    /// As [`AttentionInspector::inspect_attention`] and [`Interrupt::check`].
    fn inspect_attention_until(
        &self,
        prompt: &Prompt,
        interrupt: &Interrupt,
    ) -> Result<AttentionSnapshot> {
        interrupt.check()?;
        let snapshot = self.inspect_attention(prompt)?;
        interrupt.check()?;
        Ok(snapshot)
    }

    /// Runs the prompt once and returns the output of every block at `positions`.
    ///
    /// # Errors
    /// As [`TextModel::generate`], [`crate::ErrorKind::InvalidOption`] for positions beyond the
    /// prompt, and [`crate::ErrorKind::Unsupported`] where the backend does not have it.
    fn hidden_states(&self, prompt: &Prompt, positions: &[usize]) -> Result<HiddenStates> {
        let _ = (prompt, positions);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show hidden states",
        ))
    }

    /// [`AttentionInspector::hidden_states`], unless `interrupt` ends it, as in
    /// [`AttentionInspector::inspect_attention_until`].
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states`] and [`Interrupt::check`].
    fn hidden_states_until(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<HiddenStates> {
        interrupt.check()?;
        let states = self.hidden_states(prompt, positions)?;
        interrupt.check()?;
        Ok(states)
    }

    /// [`AttentionInspector::hidden_states_until`] of many prompts, each with positions of its own.
    /// Engines run several in one pass; this one, for those that do not, runs one after the other.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states_until`], for any of the prompts, and
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
            .map(|(prompt, positions)| self.hidden_states_until(prompt, positions, interrupt))
            .collect()
    }

    /// What each part of the model adds to the residual stream at `positions` of a prompt, unless
    /// `interrupt` ends it.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states_until`].
    fn trace_residuals(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<ResidualTrace> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show what the parts of a block add",
        ))
    }

    /// The attention weights of the prompt's last token in `layers`, or in all; after the cap on
    /// scores, windows and sinks. `interrupt` ends it.
    ///
    /// # Errors
    /// As [`AttentionInspector::inspect_attention_until`];
    /// [`crate::ErrorKind::InvalidOption`] for a layer that is not there.
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

    /// What the feed-forward part of each layer reads at `positions` of a prompt. `interrupt` ends
    /// it.
    ///
    /// # Errors
    /// As [`AttentionInspector::hidden_states_until`].
    fn feed_forward_inputs(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<FeedForwardInputs> {
        let _ = (prompt, positions, interrupt);
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show what feed-forward parts read",
        ))
    }

    /// The feed-forward part of a layer, feature by feature.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for a layer that is not there, and
    /// [`crate::ErrorKind::Unsupported`] for one without features of its own, such as one with
    /// experts, and where the backend does not have it.
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
    /// [`crate::ErrorKind::InvalidOption`] for a layer that is not there, and
    /// [`crate::ErrorKind::Unsupported`] for one without plain attention or without keys of its
    /// own, and where the backend does not have it.
    fn attention_projections(&self, layer: usize) -> Result<AttentionProjections> {
        let _ = layer;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show the matrices of attention",
        ))
    }

    /// The embeddings of tokens, `[tokens, hidden_size]` row-major, as the table has them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for a token outside of the vocabulary, and
    /// [`crate::ErrorKind::Unsupported`] where the backend does not have it.
    fn token_embeddings(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let _ = tokens;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not show embeddings of tokens",
        ))
    }

    /// The products of the embeddings of all tokens, as the table has them, and some vectors,
    /// `[vectors, hidden_size]` row-major: one list of `vocab_size` numbers a vector.
    ///
    /// # Errors
    /// As [`AttentionInspector::unembed`].
    fn token_scores(&self, vectors: &[f32]) -> Result<Vec<Vec<f32>>> {
        let _ = vectors;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend does not multiply with embeddings of tokens",
        ))
    }

    /// The logits that the model's last norm and head make of hidden states, `[states,
    /// hidden_size]` row-major: of the last block's output these are the model's own, of an earlier
    /// block's they are its "logit lens" (nostalgebraist, 2020). One list of `vocab_size` logits a
    /// state.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] when the numbers are no whole states, and
    /// [`crate::ErrorKind::Unsupported`] where the backend does not have it.
    fn unembed(&self, states: &[f32]) -> Result<Vec<Vec<f32>>> {
        let _ = states;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend makes no logits of hidden states",
        ))
    }
}

/// Each prompt has its positions.
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

/// How the hidden states of a text become one vector.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// That of the last token.
    Last,
}

impl std::str::FromStr for Pooling {
    type Err = crate::error::Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "mean" => Ok(Pooling::Mean),
            "last" => Ok(Pooling::Last),
            _ => Err(crate::error::Error::new(
                crate::error::ErrorKind::InvalidOption,
                format!("pooling `{s}` is not one of mean, last"),
            )),
        }
    }
}

/// A model that makes vectors of texts.
pub trait EmbeddingModel: TextModel {
    /// One vector of `hidden_size` elements for each prompt, in their order: the last hidden states
    /// (after the final norm), pooled, and scaled to length one when `normalize`.
    ///
    /// # Errors
    /// As [`TextModel::generate`], for any of the prompts.
    fn embed(&self, prompts: &[Prompt], pooling: Pooling, normalize: bool)
    -> Result<Vec<Vec<f32>>>;

    /// [`EmbeddingModel::embed`], unless `interrupt` ends it. Engines ask between the steps of a
    /// prompt; this one, for those that do not, asks before and after.
    ///
    /// # Errors
    /// As [`EmbeddingModel::embed`] and [`Interrupt::check`].
    fn embed_until(
        &self,
        prompts: &[Prompt],
        pooling: Pooling,
        normalize: bool,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        interrupt.check()?;
        let vectors = self.embed(prompts, pooling, normalize)?;
        interrupt.check()?;
        Ok(vectors)
    }
}
