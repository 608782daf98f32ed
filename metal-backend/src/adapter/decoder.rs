//! A decoder that adapters can stand on.

use std::sync::Arc;

use inference::LayerHooks;
use mlx_rs_core::Array;

use crate::arch::Decoder;
use crate::cache::{CacheOptions, Caches, Row};
use crate::nn::adapter::Passes;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::{Attention, FeedForward};

/// A decoder whose passes see all of a change of the adapter, or none of it.
#[derive(Debug)]
pub(crate) struct Adapted {
    pub decoder: Box<dyn Decoder>,
    pub passes: Arc<Passes>,
}

impl Decoder for Adapted {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        self.passes
            .pass(|| self.decoder.forward(ids, rows, positions, watch))
    }

    fn unembed(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.passes.pass(|| self.decoder.unembed(x))
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        self.decoder.new_caches(options)
    }

    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        self.decoder.hooks()
    }

    fn token_vectors(&self, ids: &Array) -> mlx_rs_core::Result<Array> {
        self.passes.pass(|| self.decoder.token_vectors(ids))
    }

    fn token_scores(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.passes.pass(|| self.decoder.token_scores(x))
    }

    fn attention(&self, layer: usize) -> Option<&Attention> {
        self.decoder.attention(layer)
    }

    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        self.decoder.feed_forward(layer)
    }

    fn keys_of(&self, layer: usize) -> usize {
        self.decoder.keys_of(layer)
    }
}
