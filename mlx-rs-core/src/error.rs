//! The error type of this crate, and nothing about how errors are captured (that is `call.rs`).

use std::fmt;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What class of fault an [`Error`] reports.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// MLX refused the call; the message is MLX's own.
    Mlx,
    /// Shapes or sizes do not fit the operation.
    Shape,
    /// The data type does not fit the operation.
    Dtype,
    /// An index or an axis is out of range.
    Index,
    /// An argument has a value the operation cannot take.
    Value,
    /// The result would not fit the memory budget (see [`crate::memory::budget`]).
    OutOfMemory,
    /// The device, or this build of MLX, does not have what was asked for.
    Unsupported,
    /// A file could not be read or written; the message holds the path and the system's reason.
    Io,
    /// A file is not what its format says it must be: truncated, malformed or inconsistent.
    Format,
}

/// A failed operation: what class, which operation, why, and the shapes it was given.
#[derive(Clone)]
pub struct Error {
    inner: Box<Inner>,
}

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    op: &'static str,
    message: String,
    shapes: Vec<Vec<i32>>,
}

impl Error {
    /// An error of `kind` in the operation `op`, for code that builds operations of its own.
    pub fn new(kind: ErrorKind, op: &'static str, message: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                op,
                message: message.into(),
                shapes: Vec::new(),
            }),
        }
    }

    /// Adds the input shapes, unless they are already there.
    pub(crate) fn with_inputs(mut self, inputs: &[&crate::Array]) -> Self {
        if self.inner.shapes.is_empty() {
            self.inner.shapes = inputs.iter().map(|a| a.shape().to_vec()).collect();
        }
        self
    }

    /// The class of the fault.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The operation that failed, such as `matmul`.
    #[must_use]
    pub fn op(&self) -> &'static str {
        self.inner.op
    }

    /// The reason; for [`ErrorKind::Mlx`] the text is MLX's own.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The shapes of the arrays the operation was given, where known.
    #[must_use]
    pub fn shapes(&self) -> &[Vec<i32>] {
        &self.inner.shapes
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.inner.op, self.inner.message)?;
        if !self.inner.shapes.is_empty() {
            f.write_str(" (inputs: ")?;
            for (i, shape) in self.inner.shapes.iter().enumerate() {
                write!(f, "{}{shape:?}", if i == 0 { "" } else { ", " })?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.inner.kind)
            .field("op", &self.inner.op)
            .field("message", &self.inner.message)
            .field("shapes", &self.inner.shapes)
            .finish()
    }
}

impl std::error::Error for Error {}
