//! Typed access to the metadata keys of one architecture. The values are untrusted.

use std::path::Path;

use super::GgufMetadata;
use crate::error::{Error, ErrorKind, Result};
use crate::files::invalid;

/// The metadata keys of one architecture: `<architecture>.<name>`.
pub(crate) struct Keys<'a> {
    pub metadata: &'a GgufMetadata,
    pub architecture: &'a str,
}

impl Keys<'_> {
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn path(&self) -> &Path {
        self.metadata.path()
    }

    pub fn wrong(&self, name: &str, message: impl std::fmt::Display) -> Error {
        invalid(
            self.path(),
            format!("the metadata key {} {message}", self.key(name)),
        )
    }

    pub fn unsupported(&self, name: &str, message: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            format!("{} {message}", self.key(name)),
        )
        .with_path(self.path())
    }

    pub fn uint(&self, name: &str, least: usize, most: usize) -> Result<Option<usize>> {
        match self.metadata.usize(&self.key(name))? {
            Some(n) if n < least || n > most => {
                Err(self.wrong(name, format!("is {n}; it must be from {least} to {most}")))
            }
            value => Ok(value),
        }
    }

    pub fn required(&self, name: &str, most: usize) -> Result<usize> {
        self.uint(name, 1, most)?
            .ok_or_else(|| self.metadata.missing(&self.key(name)))
    }

    /// A number that a file may contain once or per layer. All layers must have an equal number.
    pub fn per_layer(&self, name: &str, most: usize) -> Result<Option<usize>> {
        let Some(values) = self.metadata.i32s(&self.key(name))? else {
            return Ok(None);
        };
        let Some(&first) = values.first() else {
            return Err(self.wrong(name, "is empty"));
        };
        if values.iter().any(|&v| v != first) {
            return Err(self.unsupported(name, "differs between layers, which is not supported"));
        }
        match usize::try_from(first) {
            Ok(n) if (1..=most).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(name, format!("is {first}; it must be from 1 to {most}"))),
        }
    }

    /// A number that a file may contain once or per layer. Returns the first nonzero value, because
    /// layers without the counted part have 0.
    pub fn of_first_layer(&self, name: &str, most: usize) -> Result<Option<usize>> {
        let Some(values) = self.metadata.i32s(&self.key(name))? else {
            return Ok(None);
        };
        match values
            .iter()
            .find(|n| **n != 0)
            .map(|&n| (n, usize::try_from(n)))
        {
            Some((_, Ok(n))) if (1..=most).contains(&n) => Ok(Some(n)),
            Some((n, _)) => Err(self.wrong(name, format!("is {n}; it must be from 1 to {most}"))),
            None => Err(self.wrong(name, "has no number above 0")),
        }
    }

    pub fn positive(&self, name: &str) -> Result<Option<f32>> {
        match self.metadata.f32(&self.key(name))? {
            Some(f) if !(f.is_finite() && f > 0.0) => {
                Err(self.wrong(name, format!("is {f}; it must be a finite number above 0")))
            }
            value => Ok(value),
        }
    }
}
