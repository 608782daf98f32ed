//! The one error type of the contract.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What class of fault an [`Error`] reports. Programs decide by this, people read the message.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No backend has the name that was asked for.
    UnknownBackend,
    /// The backend is linked but cannot work on this machine.
    UnavailableBackend,
    /// No backend is linked, or none can work here.
    NoBackend,
    /// Two backends claim one name.
    DuplicateBackend,
    /// There is no model at the path.
    ModelNotFound,
    /// The model's files are damaged, incomplete or contradict each other.
    InvalidModel,
    /// The backend does not have what was asked for.
    Unsupported,
    /// An option or argument has a value that cannot be used.
    InvalidOption,
    /// The caller cancelled the request.
    Cancelled,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The request would need more memory than there is.
    OutOfMemory,
    /// The model was closed.
    Closed,
    /// Reading or writing failed.
    Io,
    /// The engine behind the backend failed.
    Engine,
}

/// A failure: its kind, what was being done, why it failed, where, and what caused it.
#[derive(Clone)]
pub struct Error {
    inner: Box<Inner>,
}

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    context: Option<String>,
    path: Option<PathBuf>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` with a message that says what is wrong and what would work.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                message: message.into(),
                context: None,
                path: None,
                source: None,
            }),
        }
    }

    /// Names the file or directory at fault, unless one is named already.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.inner.path.get_or_insert_with(|| path.into());
        self
    }

    /// Keeps the error that caused this one.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.inner.source = Some(Arc::from(source.into()));
        self
    }

    /// Says what was being done; an outer context goes in front of an inner one.
    #[must_use]
    pub fn context(mut self, doing: impl Into<String>) -> Self {
        let doing = doing.into();
        self.inner.context = Some(match self.inner.context.take() {
            Some(inner) => format!("{doing}: {inner}"),
            None => doing,
        });
        self
    }

    /// The class of the fault.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The reason, without context and path.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The file or directory at fault, where one is.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }
}

impl fmt::Display for Error {
    /// One line: `context: message (path)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(context) = &self.inner.context {
            write!(f, "{context}: ")?;
        }
        f.write_str(&self.inner.message)?;
        if let Some(path) = &self.inner.path {
            write!(f, " ({})", path.display())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.inner.kind)
            .field("context", &self.inner.context)
            .field("message", &self.inner.message)
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
    use std::error::Error as _;

    #[test]
    fn one_line_says_what_where_and_why() {
        let io = std::io::Error::other("disk on fire");
        let e = Error::new(ErrorKind::Io, "cannot read the header")
            .with_path("/m/model.gguf")
            .with_path("/other")
            .with_source(io)
            .context("gguf")
            .context("load");
        assert_eq!(e.to_string(), "load: gguf: cannot read the header (/m/model.gguf)");
        assert_eq!(e.source().unwrap().to_string(), "disk on fire");
        assert_eq!(e.kind(), ErrorKind::Io);
        assert_eq!(e.clone().path(), Some(Path::new("/m/model.gguf")));
    }
}
