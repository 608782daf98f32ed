//! Limits for untrusted data files, and errors of reading these files.

use inference::{Error, ErrorKind};

/// Limits for untrusted files. In addition, JSON may be nested at most 128 levels deep.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataLimits {
    /// Maximum bytes of one file.
    pub file_bytes: u64,
    /// Maximum bytes of one line.
    pub line_bytes: usize,
    /// Maximum number of lines in one file.
    pub lines: usize,
    /// Maximum number of token ids in one file.
    pub tokens: usize,
    /// The number of bad lines at which reading stops.
    pub bad_lines: usize,
}

impl Default for DataLimits {
    fn default() -> Self {
        Self {
            file_bytes: 4 << 30,
            line_bytes: 8 << 20,
            lines: 10_000_000,
            tokens: 1 << 30,
            bad_lines: 1000,
        }
    }
}

pub(super) fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

pub(super) fn io(doing: &str, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot {doing}")).with_source(e)
}
