//! How failures of MLX become errors of the contract.

use inference::{Error, ErrorKind};

/// Wraps an MLX error with what the engine was doing: `.map_err(engine("prefill"))`.
pub(crate) fn engine(doing: &'static str) -> impl Fn(mlx_rs_core::Error) -> Error {
    move |e| {
        let kind = match e.kind() {
            mlx_rs_core::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Engine,
        };
        Error::new(kind, e.to_string()).context(doing)
    }
}
