//! The facade crate for running language models on MLX from Rust.
//!
//! It re-exports the contract ([`inference`]), the array library (`mlx`) and the engine
//! (`metal_backend`, and `mlxlm_backend` for Python's mlx-lm). It adds [`hub`], which finds and
//! downloads models by name. It contains no engine code. This crate refers to the engine, so a
//! program that uses it links the engine's backends, and [`inference::backends`] lists them.
//!
//! ```no_run
//! use rust_mlx::{hub, inference};
//!
//! # fn main() -> inference::Result<()> {
//! let model = inference::load_model(hub::first_model()?, &inference::LoadOptions::default())?;
//! let options = inference::GenerateOptions::default();
//! for token in model.generate(&"The capital of France is".into(), &options)? {
//!     print!("{}", token?.text);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Without the default feature `mlx-backend`, no part of MLX is built or linked. Without `mlxlm`,
//! there is no backend `mlx_lm`. Programs then have only the backends that they register
//! themselves.
#![forbid(unsafe_code)]

#[cfg(feature = "mlx-backend")]
pub mod export;
pub mod hub;

/// The contract between programs and backends; see the crate `rust-mlx-inference-api`.
pub use inference;

/// The MLX engine behind the contract: backends `metal`, `cuda` and `cpu`.
#[cfg(feature = "mlx-backend")]
pub use metal_backend;

/// Python's mlx-lm as a subprocess behind the contract: backend `mlx_lm`.
#[cfg(feature = "mlxlm")]
pub use mlxlm_backend;

/// MLX's arrays and operations, safe to use from Rust; see the crate `rust-mlx-core`.
#[cfg(feature = "mlx-backend")]
pub use mlx_rs_core as mlx;
