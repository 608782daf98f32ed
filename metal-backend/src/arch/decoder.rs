//! The interface of a network to the rest of the engine.

use inference::LayerHooks;
use mlx_rs_core::{Array, Result};

use crate::cache::{CacheOptions, Caches, Row};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::{Attention, FeedForward};

/// A network: a decoder-only language model, or an encoder.
pub trait Decoder: Send + Sync + std::fmt::Debug {
    /// Computes logits for the token ids `[1, T]` of `rows`, which are packed one after another.
    /// The result is `[1, T, vocab]`, or `[1, rows, vocab]` for [`Positions::Last`]. Keys and
    /// values of all positions are added to the rows' caches. If the adapter scope requests it,
    /// blocks are recomputed in the backward pass.
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array>;

    /// Applies the final norm and the head: hidden states `[1, T, hidden]` to logits `[1, T,
    /// vocab]`.
    fn unembed(&self, x: &Array) -> Result<Array>;

    /// For each hidden state of [`Self::unembed`], the `k` greatest logits in descending order, and
    /// their tokens: float32 and uint32 `[T, k]`. The other logits are not stored in memory. `None`
    /// if the caller must select from all logits.
    ///
    /// # Errors
    /// As [`Self::unembed`].
    fn greatest_logits(&self, x: &Array, k: usize) -> Result<Option<(Array, Array)>> {
        let _ = (x, k);
        Ok(None)
    }

    /// Empty caches for one row, one per layer that has keys.
    fn new_caches(&self, options: &CacheOptions) -> Caches;

    /// For each layer, the places whose states can be edited; `None` in a decoder without access to
    /// states.
    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        None
    }

    /// The feed-forward part of a layer. `None` if the layer fuses it with other computation.
    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        let _ = layer;
        None
    }

    /// As [`Self::feed_forward`], to be replaced before the first request. Also `None` in a decoder
    /// that is in use.
    fn feed_forward_mut(&mut self, layer: usize) -> Option<&mut FeedForward> {
        let _ = layer;
        None
    }

    /// The encoder interface, if this is an encoder. An encoder predicts no next token, so its
    /// [`Self::forward`] returns an error.
    fn encoder(&self) -> Option<&dyn Encoder> {
        None
    }

    /// The embeddings of ids `[1, n]` as `[1, n, hidden]`, as stored in the table.
    ///
    /// # Errors
    /// If another process has the table.
    fn token_vectors(&self, ids: &Array) -> Result<Array>;

    /// The dot products of vectors `[.., hidden]` with all rows of the table, `[.., vocab]`.
    ///
    /// # Errors
    /// As [`Self::token_vectors`].
    fn token_scores(&self, x: &Array) -> Result<Array>;

    /// The attention of a layer; `None` if other parts of the layer mix positions.
    fn attention(&self, layer: usize) -> Option<&Attention> {
        let _ = layer;
        None
    }

    /// Whether every matrix of the network reads the positions of all rows in the order of the
    /// rows, `[1, T, ..]` or `[1, rows, ..]`. Rows with different adapters can then share a pass.
    fn keeps_row_order(&self) -> bool {
        false
    }

    /// The index of the cache whose keys `layer` uses.
    fn keys_of(&self, layer: usize) -> usize {
        layer
    }
}

/// The tokens of several texts, packed one after another.
#[derive(Debug, Clone, Copy)]
pub struct EncoderInput<'a> {
    /// Ids, `[T]`.
    pub ids: &'a [u32],
    /// For each token, its part of a text pair, `[T]`: 0 or 1.
    pub types: &'a [u32],
    /// The number of tokens in each text; their sum is `T`.
    pub lengths: &'a [i32],
}

/// A network with bidirectional attention, which predicts no next token.
pub trait Encoder: Send + Sync + std::fmt::Debug {
    /// The last hidden states, `[1, T, hidden]`.
    fn encode(&self, input: &EncoderInput<'_>) -> Result<Array>;

    /// The maximum number of tokens in a text; `None` if unlimited.
    fn max_length(&self) -> Option<usize>;

    /// The number of scores per text that the classifier returns; `None` without a classifier.
    fn labels(&self) -> Option<usize>;

    /// The classifier's scores, `[1, texts, labels]`, for hidden states `[1, T, hidden]` of texts
    /// of these lengths.
    ///
    /// # Errors
    /// If there is no classifier, shapes do not match, or memory runs out.
    fn classify(&self, states: &Array, lengths: &[i32]) -> Result<Array>;
}
