//! How a vindex is written.

use super::index::{Level, Numbers};

/// What a vindex gets, and what becomes of one that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Build {
    /// Tokens of each feature at most, up to 255.
    pub down_top_k: usize,
    /// How much of the model.
    pub level: Level,
    /// How numbers are stored.
    pub numbers: Numbers,
    /// Goes on where an interrupted build of the same kind stopped, and keeps what is there when
    /// this one is interrupted. Else an interrupted build leaves nothing.
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
