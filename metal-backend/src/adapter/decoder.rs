//! A decoder wrapper that determines which adapters its passes use.

use std::sync::Arc;

use inference::LayerHooks;
use mlx_rs_core::Array;

use crate::arch::Decoder;
use crate::arch::{Encoder, EncoderInput};
use crate::cache::{CacheOptions, Caches, Row};
use crate::nn::adapter::{Pass, Passes};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::{Attention, FeedForward};

/// The adapters that a decoder's passes use.
#[derive(Debug)]
pub(crate) enum Seen {
    /// The model's own adapter. A pass runs entirely before or entirely after an adapter change.
    Own(Arc<Passes>),
    /// The given adapters instead of the model's own.
    These(Arc<Pass>),
}

impl Seen {
    fn pass<R>(&self, f: impl FnOnce() -> R) -> R {
        match self {
            Self::Own(passes) => passes.pass(f),
            Self::These(pass) => pass.run(f),
        }
    }
}

/// A decoder whose passes use the adapters in `seen`.
#[derive(Debug)]
pub(crate) struct Adapted {
    pub decoder: Arc<dyn Decoder>,
    pub seen: Seen,
}

impl Decoder for Adapted {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        self.seen
            .pass(|| self.decoder.forward(ids, rows, positions, watch))
    }

    fn unembed(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.seen.pass(|| self.decoder.unembed(x))
    }

    fn greatest_logits(&self, x: &Array, k: usize) -> mlx_rs_core::Result<Option<(Array, Array)>> {
        self.seen.pass(|| self.decoder.greatest_logits(x, k))
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        self.decoder.new_caches(options)
    }

    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        self.decoder.hooks()
    }

    fn token_vectors(&self, ids: &Array) -> mlx_rs_core::Result<Array> {
        self.seen.pass(|| self.decoder.token_vectors(ids))
    }

    fn token_scores(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.seen.pass(|| self.decoder.token_scores(x))
    }

    fn attention(&self, layer: usize) -> Option<&Attention> {
        self.decoder.attention(layer)
    }

    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        self.decoder.feed_forward(layer)
    }

    fn keeps_row_order(&self) -> bool {
        self.decoder.keeps_row_order()
    }

    fn keys_of(&self, layer: usize) -> usize {
        self.decoder.keys_of(layer)
    }

    fn encoder(&self) -> Option<&dyn Encoder> {
        self.decoder.encoder().map(|_| self as &dyn Encoder)
    }
}

impl Adapted {
    /// The encoder inside the wrapped decoder.
    fn own(&self) -> mlx_rs_core::Result<&dyn Encoder> {
        self.decoder.encoder().ok_or_else(|| {
            let message = "the network is not an encoder";
            mlx_rs_core::Error::new(mlx_rs_core::ErrorKind::Unsupported, "encoder", message)
        })
    }
}

impl Encoder for Adapted {
    fn encode(&self, input: &EncoderInput<'_>) -> mlx_rs_core::Result<Array> {
        let encoder = self.own()?;
        self.seen.pass(|| encoder.encode(input))
    }

    fn max_length(&self) -> Option<usize> {
        self.decoder.encoder()?.max_length()
    }

    fn labels(&self) -> Option<usize> {
        self.decoder.encoder()?.labels()
    }

    fn classify(&self, states: &Array, lengths: &[i32]) -> mlx_rs_core::Result<Array> {
        let encoder = self.own()?;
        self.seen.pass(|| encoder.classify(states, lengths))
    }
}
