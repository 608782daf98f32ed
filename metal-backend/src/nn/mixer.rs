//! The mixer of a decoder block: attention or a recurrent layer. Blocks are generic over the mixer
//! (`arch/stack.rs`), and each mixer defines its state.

use mlx_rs_core::{Array, Result};

use super::attention::{Attention, Positions};
use super::hooks::Watch;
use super::norm::Norm;
use crate::cache::{CacheOptions, LayerState, Row, Switch};

/// The part of a decoder block in which a position reads earlier positions.
pub trait Mixer: std::fmt::Debug + Send + Sync + 'static {
    /// Maps `x` `[1, T, hidden]`, after `norm` if given, to `[1, T or rows, hidden]`. `x`
    /// concatenates rows; rows do not attend to each other. The states of `layer` advance by all
    /// positions of their rows. If `add` is set, adds the result to `x`.
    ///
    /// If a row's state has another kind, such as the cache without storage in training, the row
    /// begins with an empty state.
    fn forward(
        &self,
        input: (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array>;

    /// Creates the empty state of one row.
    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState>;

    /// Returns how the layer's rotation depends on the length of a sequence; `None` if it does not.
    fn switch(&self) -> Option<Switch> {
        None
    }

    /// Returns the mixer as attention, if it is attention. Our kernels can fuse complete blocks
    /// with attention.
    fn as_attention(&self) -> Option<&Attention> {
        None
    }
}

impl Mixer for Attention {
    fn forward(
        &self,
        input: (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        Attention::forward(self, input, rows, layer, positions, watch)
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        match self.chunk {
            Some(chunk) => options.chunk_cache(chunk),
            None => options.cache(self.window),
        }
    }

    fn switch(&self) -> Option<Switch> {
        Attention::switch(self)
    }

    fn as_attention(&self) -> Option<&Attention> {
        Some(self)
    }
}

/// Allows mixers of different kinds in one decoder.
impl Mixer for Box<dyn Mixer> {
    fn forward(
        &self,
        input: (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        self.as_ref().forward(input, rows, layer, positions, watch)
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        self.as_ref().new_state(options)
    }

    fn switch(&self) -> Option<Switch> {
        self.as_ref().switch()
    }

    fn as_attention(&self) -> Option<&Attention> {
        self.as_ref().as_attention()
    }
}
