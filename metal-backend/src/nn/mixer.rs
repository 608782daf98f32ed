//! The mixer of positions in a decoder block: attention, or a recurrent layer. A block is generic
//! over it (`arch/stack.rs`), and each mixer defines its state.

use mlx_rs_core::{Array, Result};

use super::attention::{Attention, Positions};
use super::hooks::Watch;
use super::norm::Norm;
use crate::cache::{CacheOptions, LayerState, Row, Switch};

/// The part of a decoder block in which positions read earlier ones.
pub trait Mixer: std::fmt::Debug + Send + Sync + 'static {
    /// Maps `x` `[1, T, hidden]`, through `norm` if given, to `[1, T or rows, hidden]`. The rows of
    /// `x` are packed one after another and do not attend to each other. The states of `layer`
    /// advance by all of their positions. With `add` the result is added to `x`.
    ///
    /// A row whose state has another kind begins with an empty state. An example is the cache
    /// without storage in training.
    fn forward(
        &self,
        input: (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array>;

    /// The empty state of one row.
    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState>;

    /// How the layer's rotation depends on the length of a sequence, if it does.
    fn switch(&self) -> Option<Switch> {
        None
    }

    /// The attention, if it is one; our kernels can fuse its whole block.
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

/// Mixers of different kinds in one decoder.
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
