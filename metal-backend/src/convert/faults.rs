//! Errors of a conversion.

use std::path::Path;

use inference::{Error, ErrorKind};

use crate::checkpoint::files::invalid;

/// An error about the output.
pub(super) fn failed(what: &str, path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, what)
        .with_path(path)
        .with_source(e)
}

/// The error for files of the model that contradict the options.
pub(super) fn wrong(path: &Path, name: &str, message: impl std::fmt::Display) -> Error {
    invalid(path, format!("tensor `{name}`: {message}"))
}
