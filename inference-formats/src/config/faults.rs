//! Errors of a configuration.

use crate::error::{Error, ErrorKind};

pub(super) fn fault(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

pub(super) fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}
