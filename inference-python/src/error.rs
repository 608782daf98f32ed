//! Converts errors of the contract to the Python exception `rust_mlx.Error`.

use inference::Error;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// The exception of an error, with its message and its kind.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let made = py
        .import("rust_mlx._errors")
        .and_then(|module| module.getattr("Error"))
        .and_then(|class| class.call1((format!("{error:#}"), error.kind().as_str())));
    made.map_or_else(|failed| failed, PyErr::from_value)
}

/// Converts an error to a Python exception.
pub(crate) fn raised<T>(py: Python<'_>, result: inference::Result<T>) -> PyResult<T> {
    result.map_err(|e| exception(py, &e))
}

/// The exception for a thread that cannot be started.
pub(crate) fn no_thread(e: std::io::Error) -> PyErr {
    PyOSError::new_err(format!("cannot start a thread: {e}"))
}
