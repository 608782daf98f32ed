//! The MLX engine behind the `inference` contract: one engine, three backends by name.
//!
//! - `metal`: Apple silicon, where MLX has Metal;
//! - `cuda`: NVIDIA, if MLX was built or provisioned with the feature `cuda`;
//! - `cpu`: everywhere; computes in float32 by default.
//!
//! Link this crate and choose by name:
//!
//! ```no_run
//! use inference::{GenerateOptions, LoadOptions};
//! use metal_backend as _; // keeps the linker from dropping the registration
//!
//! # fn main() -> inference::Result<()> {
//! let model = inference::load_model("model.gguf", &LoadOptions::new().with_backend("cpu"))?;
//! let text = model.generate(&"Once upon a time".into(), &GenerateOptions::new())?.text()?;
//! # let _ = text;
//! # Ok(()) }
//! ```
//!
//! # Memory and devices
//!
//! MLX counts memory per process, not per model:
//!
//! | Function | Effect |
//! |---|---|
//! | [`active_memory`], [`peak_memory`], [`cache_memory`] | bytes in arrays; the maximum since [`reset_peak`]; bytes kept for reuse |
//! | [`set_cache_limit`], [`set_memory_limit`], [`set_wired_limit`] | set a limit in bytes; each returns the previous limit |
//! | [`clear_cache`], [`reset_peak`] | frees the memory kept for reuse; restarts the measurement of the peak |
//! | [`metal_is_available`], [`cuda_is_available`], [`Device::info`] | properties of the machine |

#![forbid(unsafe_code)]

mod adapter;
mod arch;
mod backend;
mod cache;
mod checkpoint;
pub mod convert;
mod divided;
mod embed;
mod engine;
mod error;
mod exec;
pub mod extract;
pub mod ffn;
pub mod gate_scores;
mod generate;
mod inspect;
mod loader;
mod model;
pub mod model_report;
mod nn;
pub mod quant;
#[doc(hidden)] // For the integration tests and the benchmark of samplers.
pub mod sample;
mod sentence;
mod steer;
mod text;
pub mod train;
mod workdir;

pub use backend::{architectures, gguf_architectures};
pub use mlx_rs_core::memory::{
    active as active_memory, cache as cache_memory, clear_cache, keep_freed, peak as peak_memory,
    reset_peak, set_cache_limit, set_limit as set_memory_limit, set_wired_limit,
};
pub use mlx_rs_core::{Device, DeviceInfo, cuda_is_available, metal_is_available};
