//! The native part of the Python module `rust_mlx`. The package in `python/rust_mlx` is its public
//! part: it has the classes, their documentation and types. Options, prompts and replies pass
//! between both parts as JSON, by [`inference::bindings`].
//!
//! - `model.rs`: loading, and the calls of a model;
//! - `shared.rs`: a loaded model that threads share;
//! - `stream.rs`: a reply, token by token;
//! - `train.rs`: a training run;
//! - `worker.rs`: a thread that computes, while the interpreter runs and handles signals;
//! - `error.rs`: the contract's errors as Python exceptions.

#![forbid(unsafe_code)]

mod error;
mod model;
mod shared;
mod stream;
mod train;
mod worker;

// A crate that nothing refers to is left out by the linker, with the backends that it registers.
#[cfg(feature = "metal-backend")]
use metal_backend as _;
use pyo3::prelude::*;

/// The native part of the package `rust_mlx`.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use super::model::{Model, backends, load};
    #[pymodule_export]
    use super::stream::Stream;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
