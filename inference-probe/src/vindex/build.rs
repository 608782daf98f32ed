//! Options for writing a vindex.

use super::index::{Level, Numbers};

/// The content of a new vindex, and how an interrupted build is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Build {
    /// The maximum number of tokens for each feature, up to 255.
    pub down_top_k: usize,
    /// How much of the model is included.
    pub level: Level,
    /// How numbers are stored.
    pub numbers: Numbers,
    /// Whether to continue an interrupted build with equal settings, and to keep the partial result
    /// if this build is interrupted. If false, an interrupted build leaves no files.
    pub resume: bool,
}

impl Default for Build {
    fn default() -> Self {
        Self {
            down_top_k: 10,
            level: Level::default(),
            numbers: Numbers::default(),
            resume: false,
        }
    }
}
