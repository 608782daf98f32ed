//! Training data: JSONL files to token ids, loss masks and batches.
//!
//! The formats, the prompt mask and the batches equal those of Python mlx-lm, so that runs of both
//! use the same data. [`formats`] reads lines, [`load`] files and directories, and [`preferences`]
//! pairs of replies; [`batches`] makes batches, and [`shuffle`] their order. This module has no
//! arrays: a batch is host memory, and the trainer copies it.

pub mod batches;
pub mod formats;
pub mod load;
pub mod pack;
pub mod preferences;
pub mod shuffle;

pub use batches::{Batch, BatchOptions, Batches, Order, Rows, Validations};
pub use formats::{FieldNames, Format};
pub use load::{BadLine, DataDir, DataLimits, DataOptions, Dataset};
pub use pack::pack;
pub use preferences::{Pair, Pairs};

use std::ops::Range;

/// One example: its ids, and which of them are targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The parts of a packed example, each with the number of ids that the loss excludes. An
    /// unpacked example has one part.
    pub parts: Vec<Part>,
}

/// One conversation or text inside an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The ids, as a range of [`Example::ids`].
    pub range: Range<usize>,
    /// The number of its first ids that the loss excludes.
    pub offset: usize,
}

impl Example {
    /// An example of one part, whose first `offset` ids the loss excludes.
    #[must_use]
    pub fn new(ids: Vec<u32>, offset: usize) -> Self {
        let range = 0..ids.len();
        Self {
            ids,
            parts: vec![Part { range, offset }],
        }
    }

    /// Number of ids.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are no ids.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The number of targets when the example is truncated to `max_len` ids. The first id of a part
    /// is never a target, because nothing predicts it.
    #[must_use]
    pub fn learned(&self, max_len: usize) -> usize {
        self.parts
            .iter()
            .map(|p| {
                let end = p.range.end.min(max_len);
                end.saturating_sub(p.range.start + p.offset.max(1))
            })
            .sum()
    }
}

#[cfg(test)]
mod golden_tests;
