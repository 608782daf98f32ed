//! Finds models on disk, with the error type of this crate.

use std::path::Path;

use inference_formats::discover as files;

pub use files::{DiscoveredModel, ModelFormat, Quantization};

use crate::error::Result;

/// An iterator over the models below a directory; see [`discover`].
#[derive(Debug)]
pub struct Discover(files::Discover);

impl Iterator for Discover {
    type Item = Result<DiscoveredModel>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.0.next()?.map_err(Into::into))
    }
}

/// Searches `dir` and its subdirectories for models, sorted by path, as
/// [`inference_formats::discover::discover`] does.
///
/// An unreadable or damaged entry becomes an `Err` item with its path, and the search continues.
/// Only headers and configurations are read, so a listed model may still be incomplete.
///
/// # Errors
/// [`ModelNotFound`](crate::ErrorKind::ModelNotFound) if `dir` does not exist,
/// [`InvalidModel`](crate::ErrorKind::InvalidModel) for a file that is not a model,
/// [`Io`](crate::ErrorKind::Io) if `dir` cannot be read.
pub fn discover(dir: impl AsRef<Path>) -> Result<Discover> {
    Ok(Discover(files::discover(dir)?))
}
