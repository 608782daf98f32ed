//! Key/value caches: what attention remembers of earlier positions. State is passed into a forward
//! pass; layers own none.

mod chunked;

pub use chunked::ChunkedCache;

use mlx_rs_core::{Array, Result};

/// The memory of one attention layer.
pub trait KvCache: std::fmt::Debug + Send {
    /// Adds keys and values `[B, Hkv, L, D]` and returns all valid ones `[B, Hkv, offset + L, D]`.
    ///
    /// # Errors
    /// When shapes do not fit what is stored, or memory runs out.
    fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)>;

    /// Positions stored, which is the position of the next token.
    fn offset(&self) -> i32;

    /// The arrays that hold the state, to be evaluated with each step so that no graph is retained.
    fn state(&self) -> Vec<&Array>;

    /// Forgets the last `n` positions (all, when fewer are stored).
    fn trim(&mut self, n: i32);
}

/// One cache a layer.
pub type Caches = Vec<Box<dyn KvCache>>;
