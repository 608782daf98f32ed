//! The error type of the contract. Exit codes and colors are the programs' task.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The class of an [`Error`]. Programs match on the class; the message is for people.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No backend has the requested name.
    UnknownBackend,
    /// The backend is linked but cannot work on this machine.
    UnavailableBackend,
    /// No backend is linked, or none can work on this machine.
    NoBackend,
    /// Two backends have the same name.
    DuplicateBackend,
    /// There is no model at the path.
    ModelNotFound,
    /// The model's files are damaged, incomplete or contradict each other.
    InvalidModel,
    /// The backend does not support the request.
    Unsupported,
    /// An option or argument has a value that cannot be used.
    InvalidOption,
    /// The caller cancelled the request.
    Cancelled,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The request needs more memory than is available.
    OutOfMemory,
    /// The model was closed.
    Closed,
    /// Reading or writing failed.
    Io,
    /// The engine behind the backend failed.
    Engine,
}

impl ErrorKind {
    /// The name in JSON, such as `unknown_backend`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::UnknownBackend => "unknown_backend",
            ErrorKind::UnavailableBackend => "unavailable_backend",
            ErrorKind::NoBackend => "no_backend",
            ErrorKind::DuplicateBackend => "duplicate_backend",
            ErrorKind::ModelNotFound => "model_not_found",
            ErrorKind::InvalidModel => "invalid_model",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::InvalidOption => "invalid_option",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::DeadlineExceeded => "deadline_exceeded",
            ErrorKind::OutOfMemory => "out_of_memory",
            ErrorKind::Closed => "closed",
            ErrorKind::Io => "io",
            ErrorKind::Engine => "engine",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error, with its kind, context, message, path and cause.
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
    /// An error of `kind`. The message names the fault and a remedy.
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

    /// Sets the path of the file or directory that caused the error, unless one is set already.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.inner.path.get_or_insert_with(|| path.into());
        self
    }

    /// Sets the cause.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.inner.source = Some(Arc::from(source.into()));
        self
    }

    /// Adds the action that failed. An outer action precedes an inner one in the message.
    #[must_use]
    pub fn context(mut self, doing: impl Into<String>) -> Self {
        let doing = doing.into();
        self.inner.context = Some(match self.inner.context.take() {
            Some(inner) => format!("{doing}: {inner}"),
            None => doing,
        });
        self
    }

    /// The class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The message, without context and path.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The path of the file or directory that caused the error, if known.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }
}

/// Converts an error about a model's files. Kind, path and cause stay; the tensor's name becomes
/// part of the message.
impl From<inference_formats::Error> for Error {
    fn from(e: inference_formats::Error) -> Self {
        use inference_formats::ErrorKind as Formats;
        let kind = match e.kind() {
            Formats::NotFound => ErrorKind::ModelNotFound,
            Formats::Unsupported => ErrorKind::Unsupported,
            Formats::OutOfMemory => ErrorKind::OutOfMemory,
            Formats::Io => ErrorKind::Io,
            // Later versions may add kinds. Those are also errors of the file.
            _ => ErrorKind::InvalidModel,
        };
        let message = match e.tensor() {
            Some(tensor) => format!("tensor `{tensor}`: {}", e.message()),
            None => e.message().to_owned(),
        };
        let mut error = Self::new(kind, message);
        if let Some(path) = e.path() {
            error = error.with_path(path);
        }
        match e.into_source() {
            Some(source) => error.with_source(source),
            None => error,
        }
    }
}

impl fmt::Display for Error {
    /// One line: `context: message (path)`. The alternate form `{:#}` appends the causes: `message
    /// (path): cause: its cause`. Programs print that form. Control characters are escaped, because
    /// names from files may contain them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::new();
        if let Some(context) = &self.inner.context {
            write!(line, "{context}: ")?;
        }
        line.push_str(&self.inner.message);
        if let Some(path) = &self.inner.path {
            write!(line, " ({})", path.display())?;
        }
        inference_formats::write_line(f, line, self)
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
        assert_eq!(
            e.to_string(),
            "load: gguf: cannot read the header (/m/model.gguf)"
        );
        assert_eq!(e.source().unwrap().to_string(), "disk on fire");
        // The causes follow the message, each exactly once.
        assert_eq!(
            format!("{e:#}"),
            "load: gguf: cannot read the header (/m/model.gguf): disk on fire"
        );
        let outer = Error::new(ErrorKind::Engine, "no start: disk on fire").with_source(e.clone());
        assert_eq!(
            format!("{outer:#}"),
            "no start: disk on fire: load: gguf: cannot read the header (/m/model.gguf)"
        );
        assert_eq!(e.kind(), ErrorKind::Io);
        assert_eq!(e.clone().path(), Some(Path::new("/m/model.gguf")));
    }

    #[test]
    fn names_from_files_cannot_forge_lines() {
        let e = Error::new(ErrorKind::InvalidModel, "tensor `a\nb\u{1b}[2J` ends\r")
            .with_path("/m/\u{9b}x\ty");
        let line = e.to_string();
        assert!(!line.chars().any(char::is_control), "{line:?}");
        assert_eq!(line, "tensor `a\\nb\\u{1b}[2J` ends\\r (/m/\\u{9b}x\\ty)");
        // `message` returns the text for programs, so it is not escaped.
        assert!(e.message().contains('\n'));
    }

    #[test]
    fn faults_of_files_keep_kind_path_and_cause() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let load = || inference_formats::ModelConfig::from_file(&path);
        let e = Error::from(load().unwrap_err());
        assert_eq!(e.kind(), ErrorKind::ModelNotFound);
        assert_eq!(e.path(), Some(path.as_path()));
        let cause = e.source().unwrap().downcast_ref::<std::io::Error>();
        assert_eq!(cause.unwrap().kind(), std::io::ErrorKind::NotFound);
        std::fs::write(&path, "{").unwrap();
        let e = Error::from(load().unwrap_err());
        assert_eq!(e.kind(), ErrorKind::InvalidModel);
        assert_eq!(e.message(), "not valid JSON");
        assert!(format!("{e:#}").contains("EOF while parsing"), "{e:#}");
        assert!(e.source().unwrap().is::<serde_json::Error>());
    }

    #[test]
    fn kinds_have_names() {
        assert_eq!(ErrorKind::DeadlineExceeded.to_string(), "deadline_exceeded");
    }
}
