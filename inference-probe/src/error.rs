//! The error type of this crate: errors about files and about values.

use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why statistics cannot be computed or files cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file does not have the expected content.
    #[error("{}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The fault, and what would be correct.
        message: String,
    },
    /// The values or labels do not allow the requested computation.
    #[error("{0}")]
    Data(String),
}

impl Error {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Error::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn file(path: &Path, message: impl Into<String>) -> Self {
        Error::File {
            path: path.to_owned(),
            message: message.into(),
        }
    }

    pub(crate) fn data(message: impl Into<String>) -> Self {
        Error::Data(message.into())
    }
}
