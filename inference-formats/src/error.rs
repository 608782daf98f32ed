//! The error type of this crate. `inference::Error`, the contract's error, converts from it.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an error. Programs match on the class; people read the message.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// There is no file or directory at the path.
    NotFound,
    /// A file is damaged, incomplete, or contradicts itself or another file.
    Invalid,
    /// A file uses a feature that this crate does not read.
    Unsupported,
    /// There is not enough memory for the data.
    OutOfMemory,
    /// Reading failed in the operating system.
    Io,
}

/// An error: its kind, message, file, tensor and cause.
pub struct Error {
    inner: Box<Inner>,
}

struct Inner {
    kind: ErrorKind,
    message: String,
    path: Option<PathBuf>,
    tensor: Option<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind`. The message names the fault and a remedy.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                message: message.into(),
                path: None,
                tensor: None,
                source: None,
            }),
        }
    }

    /// Adds the path of the file or directory that caused the error, unless the error has a path.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.inner.path.get_or_insert_with(|| path.into());
        self
    }

    /// Adds the name of the tensor that caused the error, as in the file.
    #[must_use]
    pub(crate) fn with_tensor(mut self, name: &str) -> Self {
        self.inner.tensor = Some(name.to_owned());
        self
    }

    /// Adds the cause of this error.
    #[must_use]
    pub(crate) fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.inner.source = Some(source.into());
        self
    }

    /// The class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The message, without tensor and path.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The file or directory that caused the error.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }

    /// The name of the tensor that caused the error, as in the file.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        self.inner.tensor.as_deref()
    }

    /// The cause, for an error type of another crate that wraps this one.
    #[must_use]
    pub fn into_source(self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        self.inner.source
    }
}

impl fmt::Display for Error {
    /// One line: ``tensor `name`: message (path)``. The alternate form, `{:#}`, adds the causes:
    /// `message (path): cause: its cause`. See [`write_line`].
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::new();
        if let Some(tensor) = &self.inner.tensor {
            write!(line, "tensor `{tensor}`: ")?;
        }
        line.push_str(&self.inner.message);
        if let Some(path) = &self.inner.path {
            write!(line, " ({})", path.display())?;
        }
        write_line(f, line, self)
    }
}

/// Writes an error as one line. In the alternate form, the causes of `error` follow `line`, except
/// causes whose text the line already contains. Control characters are escaped: names come from
/// files, and could otherwise control a terminal or forge log lines. Crates that use this one
/// format their errors with this function, too.
///
/// # Errors
/// Errors of the formatter `f`.
pub fn write_line(
    f: &mut fmt::Formatter<'_>,
    mut line: String,
    error: &dyn std::error::Error,
) -> fmt::Result {
    let mut cause = error.source().filter(|_| f.alternate());
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            write!(line, ": {text}")?;
        }
        cause = error.source();
    }
    for c in line.chars() {
        if c.is_control() {
            write!(f, "{}", c.escape_default())?;
        } else {
            f.write_char(c)?;
        }
    }
    Ok(())
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.inner.kind)
            .field("message", &self.inner.message)
            .field("tensor", &self.inner.tensor)
            .field("path", &self.inner.path)
            .field("source", &self.inner.source)
            .finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.source.as_deref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_names_tensor_reason_and_file() {
        let e = Error::new(ErrorKind::Invalid, "has shape [2]")
            .with_tensor("a\nb")
            .with_path("/m/\u{1b}x")
            .with_path("/other")
            .with_source(std::io::Error::other("disk on fire"));
        assert_eq!(e.to_string(), "tensor `a\\nb`: has shape [2] (/m/\\u{1b}x)");
        assert_eq!(
            format!("{e:#}"),
            "tensor `a\\nb`: has shape [2] (/m/\\u{1b}x): disk on fire"
        );
        assert_eq!(e.tensor(), Some("a\nb"));
        assert_eq!(e.path(), Some(Path::new("/m/\u{1b}x")));
        let source = std::error::Error::source(&e).map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("disk on fire"));
        assert_eq!(e.into_source().unwrap().to_string(), "disk on fire");
    }
}
