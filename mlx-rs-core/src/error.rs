//! The error type of this crate. `call.rs` captures errors of MLX.

use std::fmt;
use std::sync::Arc;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of failure that an [`Error`] reports.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// MLX refused the call. The message is MLX's own.
    Mlx,
    /// Shapes or sizes do not fit the operation.
    Shape,
    /// The data type does not fit the operation.
    Dtype,
    /// An index or an axis is out of range.
    Index,
    /// An argument has a value that the operation does not accept.
    Value,
    /// The result would not fit the memory budget (see [`crate::memory::budget`]), or the system
    /// refused memory.
    OutOfMemory,
    /// The device, or this build of MLX, does not support the request.
    Unsupported,
    /// A file could not be read or written. The message contains the path and the system's reason.
    Io,
    /// A file violates its format: truncated, malformed or inconsistent.
    Format,
    /// This thread waited too long for MLX. Another thread runs a function passed to a transform,
    /// and this function seems to wait for a thread that uses MLX (see
    /// [`set_deadlock_timeout`](crate::transforms::set_deadlock_timeout)).
    Deadlock,
    /// A function passed to a transform failed with an error of another type, which is the
    /// [source](std::error::Error::source).
    Callback,
}

/// A failed operation: the kind of failure, the operation, the reason, and the input shapes.
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
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` in the operation `op`, for code that builds further operations.
    ///
    /// ```
    /// use mlx_rs_core::{Error, ErrorKind};
    /// let e = Error::new(ErrorKind::Value, "my_layer", "the width must be even, not 3");
    /// assert_eq!(e.to_string(), "my_layer: the width must be even, not 3");
    /// ```
    pub fn new(kind: ErrorKind, op: &'static str, message: impl Into<String>) -> Self {
        Self {
            inner: Box::new(Inner {
                kind,
                op,
                message: message.into(),
                shapes: Vec::new(),
                source: None,
            }),
        }
    }

    /// An error of another type that a function passed to a transform returned.
    pub(crate) fn callback(
        op: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    ) -> Self {
        let mut error = Self::new(ErrorKind::Callback, op, source.to_string());
        error.inner.source = Some(source.into());
        error
    }

    /// Sets the input shapes, unless they are already set.
    pub(crate) fn with_inputs(mut self, inputs: &[&crate::Array]) -> Self {
        if self.inner.shapes.is_empty() {
            self.inner.shapes = inputs.iter().map(|a| a.shape().to_vec()).collect();
        }
        self
    }

    /// Prefixes the message with a location, such as a file or a name.
    pub(crate) fn context(mut self, place: impl fmt::Display) -> Self {
        self.inner.message = format!("{place}: {}", self.inner.message);
        self
    }

    /// The kind of failure.
    ///
    /// ```
    /// use mlx_rs_core::{ErrorKind, array};
    /// let e = array!([1.0, 2.0])?.item::<f32>().unwrap_err();
    /// assert_eq!(e.kind(), ErrorKind::Shape);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The operation that failed, such as `matmul`.
    ///
    /// ```
    /// let e = mlx_rs_core::array!([1.0, 2.0])?.item::<f32>().unwrap_err();
    /// assert_eq!(e.op(), "item");
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn op(&self) -> &'static str {
        self.inner.op
    }

    /// The reason. For [`ErrorKind::Mlx`] it is MLX's own text.
    ///
    /// ```
    /// let e = mlx_rs_core::array!([1.0, 2.0])?.item::<f32>().unwrap_err();
    /// assert!(e.message().contains("[2]"), "{}", e.message());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// The shapes of the operation's input arrays, if known.
    ///
    /// ```
    /// let a = mlx_rs_core::array!([1.0, 2.0])?;
    /// let e = a.add(&mlx_rs_core::array!([1.0, 2.0, 3.0])?).unwrap_err();
    /// assert_eq!(e.shapes(), [[2], [3]]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
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

impl std::error::Error for Error {
    /// For [`ErrorKind::Callback`], the error that the function returned. Otherwise `None`.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.source.as_deref().map(|e| e as _)
    }
}
