//! Errors about files of models and adapters, in the types of the public contract.

use std::path::Path;

use inference::{Error, ErrorKind};

pub use inference_formats::files::{MAX_TEXT_FILE, ModelDir, read_capped, read_text};

/// Returns the error for an invalid file.
pub fn invalid(path: &Path, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidModel, message).with_path(path)
}

/// Returns the error for the tensor `name` in the file at `path`.
pub fn wrong_tensor(path: &Path, name: &str, message: impl std::fmt::Display) -> Error {
    invalid(path, format!("tensor `{name}`: {message}"))
}
