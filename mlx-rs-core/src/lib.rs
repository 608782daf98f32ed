//! Safe arrays on Apple's MLX.
//!
//! This crate wraps mlx-c so that a Rust program cannot reach undefined behavior through it. Every
//! C call goes through one private module, `call`. Every failure is a [`Result`] with MLX's own
//! message. Every array is freed when its [`Array`] is dropped.
//!
//! The [`guide`] has the same chapters as MLX's own guide: arrays, lazy evaluation, indexing,
//! transforms, streams, memory.
//!
//! # Lazy evaluation
//!
//! Operations only record a graph; [`eval`], [`async_eval`] and the data accessors
//! ([`Array::to_vec`], [`Array::item`]) run it.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let b = a.matmul(&a.transpose()?)?; // nothing is computed yet
//! assert_eq!(b.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
//! # Ok(()) }
//! ```
//!
//! # Threads
//!
//! MLX builds graphs, creates streams and registers compiled functions through global state that it
//! does not lock. So calls from two threads at once corrupt memory. Here every call that can touch
//! that state takes one process-wide **reentrant lock**. [`Array`] and [`Stream`] are therefore
//! `Send` and `Sync` by construction. The alternative, a single owning thread, would cost two
//! context switches per call: 43 µs against 5 ns for the uncontended lock, medians on a busy 2-core
//! machine. (`cargo bench -p rust-mlx-core` measures both on your machine.) It would also make
//! nested calls from callbacks impossible. The cost of the lock: while one thread waits in
//! [`eval`], other threads must wait to build graphs. The computation itself runs on MLX's own
//! stream threads, which never take the lock.
//!
//! # What this crate validates
//!
//! This crate checks sizes against slices, index ranges of gathers, strides of views, integer
//! division by zero, and allocations against [`memory::budget`]. MLX itself reads out of bounds or
//! aborts in these cases.

#[macro_use]
mod macros;

mod activation;
mod array;
mod call;
mod closure;
mod compat;
mod deadlock;
mod device;
mod dtype;
mod error;
mod exit;
mod failure;
mod operators;
mod ops;
mod quirks;
mod stack;
mod stalled;
mod stream;

pub mod guide;

pub mod cpu;
pub mod dispatch;
pub mod distributed;
pub mod fast;
pub mod fft;
pub mod indexing;
pub mod io;
pub mod kernel;
pub mod library;
pub mod linalg;
mod mapped;
pub mod memory;
pub mod metal;
pub mod random;
pub mod transforms;

pub use array::{Array, ChunkedArray, Data, Iter, Nested, Values, fill_arrays};
pub use device::{Device, DeviceInfo, DeviceKind, cuda_is_available, metal_is_available};
pub use dtype::{Dtype, Element, FloatElement};
pub use error::{Error, ErrorKind, Result};
pub use half::{bf16, f16};
pub use num_complex::Complex32;
pub use operators::Operand;
pub use ops::{
    All, Axes, Conv, GridIndexing, IndexArg, MatrixIndices, Pad, QuantMode, Quantized, ScatterMode,
    Side, arange, bartlett, blackman, broadcast_arrays, concatenate, concatenate_flat, depends,
    einsum, eye, full, hamming, hanning, identity, linspace, meshgrid, ones, stack, tri, where_,
    zeros,
};
pub use stream::Stream;
pub use transforms::{async_eval, eval, synchronize};

/// The version of the loaded MLX library, such as `0.30.6`.
///
/// ```
/// assert!(mlx_rs_core::mlx_version()?.starts_with("0."));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When MLX cannot report its version.
pub fn mlx_version() -> Result<String> {
    call::string("version", |out| {
        // SAFETY: `out` is a valid, writable string handle for the length of the call.
        unsafe { mlx_sys::mlx_version(out) }
    })
}
