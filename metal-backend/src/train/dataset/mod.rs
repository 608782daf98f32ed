//! Training data: converts JSONL and Parquet files to token ids, loss masks and batches.
//!
//! Formats, prompt masks and batches equal those of Python mlx-lm, so that both programs train on
//! the same data. [`formats`] converts lines, [`files`] finds files, and [`load`] reads them; with
//! the feature `parquet` also Parquet files. [`preferences`] reads pairs of replies, [`verdicts`]
//! replies that are good or bad, [`prompts`] prompts without replies, and [`related`] texts for
//! encoders. [`batches`] makes batches, and [`shuffle`] determines their order. Batches are in host
//! memory; the trainer copies them to arrays.

pub mod batches;
pub mod files;
#[cfg(feature = "parquet")]
mod footer;
pub mod formats;
mod limits;
pub mod load;
pub mod pack;
#[cfg(feature = "parquet")]
mod parquet;
pub mod preferences;
pub mod prompts;
pub mod related;
pub mod shuffle;
pub mod verdicts;

pub use batches::{Batch, BatchOptions, Batches, Order, Rows, Validations};
pub use formats::{FieldNames, Format};
pub use limits::DataLimits;
pub use load::{BadLine, DataDir, DataOptions, Dataset};
pub use pack::pack;
pub use preferences::{Pair, Pairs};
pub use prompts::{PromptLine, Prompts};
pub use related::RelatedFile;
pub use verdicts::{Verdict, Verdicts};

use std::ops::Range;

/// One example: its token ids, and which of them are targets.
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
    /// The part's ids, as a range of [`Example::ids`].
    pub range: Range<usize>,
    /// The number of ids at the start of the part that the loss excludes.
    pub offset: usize,
}

impl Example {
    /// Creates an example of one part. The loss excludes its first `offset` ids.
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

    /// Returns the number of targets after truncation to `max_len` ids. The first id of a part is
    /// never a target, because nothing in the part predicts it.
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
