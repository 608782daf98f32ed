//! Errors of a conversion.

use std::path::Path;

use inference::{Error, ErrorKind};

use crate::checkpoint::files::invalid;

/// Returns an error about the output.
pub(super) fn failed(what: &str, path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, what)
        .with_path(path)
        .with_source(e)
}

/// Returns an error about a tensor of the model.
pub(super) fn wrong(path: &Path, name: &str, message: impl std::fmt::Display) -> Error {
    invalid(path, format!("tensor `{name}`: {message}"))
}
