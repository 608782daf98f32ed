//! Training data: JSONL files to token ids, loss masks and batches.
//!
//! The formats, the prompt mask and the batches are those of Python mlx-lm, so that a run here and
//! one there see the same numbers. [`formats`] reads one line, [`load`] files and directories,
//! [`preferences`] pairs of replies; [`batches`] makes batches and [`shuffle`] their order. No
//! arrays here: a batch is host memory, the trainer copies it.

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

/// One example: its ids, and which of them the model is to learn to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Where the parts of a packed example begin, and from where in each on the model learns. An
    /// example as read has one part.
    pub parts: Vec<Part>,
}

/// One conversation or text inside an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its ids, as a range of [`Example::ids`].
    pub range: Range<usize>,
    /// The number of its ids, from its beginning, that the loss leaves out.
    pub offset: usize,
}

impl Example {
    /// An example of one part, whose first `offset` ids the loss leaves out.
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

    /// How many ids the loss counts, when the example is cut to `max_len` ids. The first id of a
    /// part is never among them: nothing predicts it.
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
