//! The interface between a network and the rest of the engine.

use inference::LayerHooks;
use mlx_rs_core::{Array, Result};

use crate::cache::{CacheOptions, Caches, Row};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::{Attention, FeedForward};

/// A network: a decoder-only language model, or an encoder.
pub trait Decoder: Send + Sync + std::fmt::Debug {
    /// Computes logits for the token ids `[1, T]`. These contain the tokens of all `rows`, one row
    /// after another. The result is `[1, T, vocab]`, or `[1, rows, vocab]` for [`Positions::Last`].
    /// The keys and values of all positions are appended to the rows' caches. If the adapter scope
    /// requests gradient checkpointing, the backward pass recomputes each block.
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array>;

    /// Maps hidden states `[1, T, hidden]` to logits `[1, T, vocab]`: applies the final norm and
    /// the head.
    fn unembed(&self, x: &Array) -> Result<Array>;

    /// Returns the `k` greatest logits of each hidden state in descending order, and their tokens:
    /// float32 and uint32 arrays `[T, k]`. `x` is an input of [`Self::unembed`]. The other logits
    /// are not stored. Returns `None` if this selection is not possible; the caller must then
    /// compute all logits.
    ///
    /// # Errors
    /// The errors of [`Self::unembed`].
    fn greatest_logits(&self, x: &Array, k: usize) -> Result<Option<(Array, Array)>> {
        let _ = (x, k);
        Ok(None)
    }

    /// Returns empty caches for one row, one for each layer that caches keys or a state.
    fn new_caches(&self, options: &CacheOptions) -> Caches;

    /// Returns the hooks that each layer supports, which are the states that a caller can edit.
    /// `None` if the decoder does not support hooks.
    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        None
    }

    /// Returns the feed-forward part of a layer; `None` if it cannot be accessed separately.
    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        let _ = layer;
        None
    }

    /// Returns the feed-forward part of a layer so that the caller can replace it before the first
    /// request. Returns `None` in the cases of [`Self::feed_forward`], and if the decoder is in
    /// use.
    fn feed_forward_mut(&mut self, layer: usize) -> Option<&mut FeedForward> {
        let _ = layer;
        None
    }

    /// Returns the encoder interface if the network is an encoder. An encoder does not predict
    /// tokens, so its [`Self::forward`] returns an error.
    fn encoder(&self) -> Option<&dyn Encoder> {
        None
    }

    /// Returns the embeddings of ids `[1, n]` as `[1, n, hidden]`, without factors and norms.
    ///
    /// # Errors
    /// If the table is in another process.
    fn token_vectors(&self, ids: &Array) -> Result<Array>;

    /// Returns the dot products of vectors `[.., hidden]` with all rows of the embedding table:
    /// `[.., vocab]`.
    ///
    /// # Errors
    /// The errors of [`Self::token_vectors`].
    fn token_scores(&self, x: &Array) -> Result<Array>;

    /// Returns the attention of a layer; `None` if the layer has no attention, or has one of
    /// another kind.
    fn attention(&self, layer: usize) -> Option<&Attention> {
        let _ = layer;
        None
    }

    /// Returns whether all matrices receive the positions in the order of the rows, `[1, T, ..]` or
    /// `[1, rows, ..]`. If so, rows with different adapters can share a pass.
    fn keeps_row_order(&self) -> bool {
        false
    }

    /// Returns the index of the cache whose keys `layer` uses.
    fn keys_of(&self, layer: usize) -> usize {
        layer
    }
}

/// The tokens of several texts, packed one after another.
#[derive(Debug, Clone, Copy)]
pub struct EncoderInput<'a> {
    /// Ids, `[T]`.
    pub ids: &'a [u32],
    /// For each token, the text of the pair to which it belongs, `[T]`: 0 or 1.
    pub types: &'a [u32],
    /// The number of tokens in each text; their sum is `T`.
    pub lengths: &'a [i32],
}

/// A network with bidirectional attention, which predicts no next token.
pub trait Encoder: Send + Sync + std::fmt::Debug {
    /// Returns the last hidden states, `[1, T, hidden]`.
    fn encode(&self, input: &EncoderInput<'_>) -> Result<Array>;

    /// Returns the maximum number of tokens in a text; `None` if unlimited.
    fn max_length(&self) -> Option<usize>;

    /// Returns the number of scores per text; `None` if there is no classifier.
    fn labels(&self) -> Option<usize>;

    /// Returns the classifier's scores, `[1, texts, labels]`. `states` are the hidden states `[1,
    /// T, hidden]` of texts with these lengths.
    ///
    /// # Errors
    /// If there is no classifier, shapes do not match, or memory runs out.
    fn classify(&self, states: &Array, lengths: &[i32]) -> Result<Array>;
}
