//! The values that the C functions return.

use inference::ErrorKind;

/// The result of a call: 0, or the kind of the error. The numbers never change; later versions may
/// add some.
#[non_exhaustive]
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded.
    Ok = 0,
    /// No backend has the requested name.
    UnknownBackend = 1,
    /// The backend is linked but cannot work on this machine.
    UnavailableBackend = 2,
    /// No backend is linked, or none can work on this machine.
    NoBackend = 3,
    /// Two backends have the same name.
    DuplicateBackend = 4,
    /// There is no model at the path, and none of this name.
    ModelNotFound = 5,
    /// The model's files are damaged, incomplete or contradict each other.
    InvalidModel = 6,
    /// The backend does not support the request.
    Unsupported = 7,
    /// An argument or option has a value that cannot be used: a null pointer, a text that is not
    /// UTF-8, JSON with a fault, an unknown name, a number out of range.
    InvalidOption = 8,
    /// The request was cancelled.
    Cancelled = 9,
    /// The request's deadline passed.
    DeadlineExceeded = 10,
    /// The request needs more memory than is available.
    OutOfMemory = 11,
    /// The model was closed.
    Closed = 12,
    /// Reading or writing failed.
    Io = 13,
    /// The engine behind the backend failed.
    Engine = 14,
    /// A fault of this library: the code panicked. The model may be used further.
    Panic = 15,
}

impl From<ErrorKind> for Status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::UnknownBackend => Self::UnknownBackend,
            ErrorKind::UnavailableBackend => Self::UnavailableBackend,
            ErrorKind::NoBackend => Self::NoBackend,
            ErrorKind::DuplicateBackend => Self::DuplicateBackend,
            ErrorKind::ModelNotFound => Self::ModelNotFound,
            ErrorKind::InvalidModel => Self::InvalidModel,
            ErrorKind::Unsupported => Self::Unsupported,
            ErrorKind::InvalidOption => Self::InvalidOption,
            ErrorKind::Cancelled => Self::Cancelled,
            ErrorKind::DeadlineExceeded => Self::DeadlineExceeded,
            ErrorKind::OutOfMemory => Self::OutOfMemory,
            ErrorKind::Closed => Self::Closed,
            ErrorKind::Io => Self::Io,
            // Later versions may add kinds, which are errors of the engine to a C program.
            _ => Self::Engine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_status_of_its_name() {
        for kind in [
            ErrorKind::UnknownBackend,
            ErrorKind::UnavailableBackend,
            ErrorKind::NoBackend,
            ErrorKind::DuplicateBackend,
            ErrorKind::ModelNotFound,
            ErrorKind::InvalidModel,
            ErrorKind::Unsupported,
            ErrorKind::InvalidOption,
            ErrorKind::Cancelled,
            ErrorKind::DeadlineExceeded,
            ErrorKind::OutOfMemory,
            ErrorKind::Closed,
            ErrorKind::Io,
            ErrorKind::Engine,
        ] {
            assert_eq!(format!("{kind:?}"), format!("{:?}", Status::from(kind)));
        }
    }
}
