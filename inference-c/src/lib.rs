//! A C interface to the inference contract, for programs in C and in languages that can call C.
//!
//! The header is `include/rust_mlx.h`, and
//! [docs/from-c.md](https://github.com/rust-mlx/rust-mlx/blob/main/docs/from-c.md) says how to build
//! and link. In Rust, use the crate `rust-mlx-inference-api` instead.
//!
//! - `status.rs`: the values that functions return, one for each [`inference::ErrorKind`];
//! - `work.rs`: what the functions do, on Rust's types, in safe code;
//! - `abi.rs`: the functions, and all unsafe code: reading arguments, and writing results.
//!
//! Each function that can fail returns a [`Status`] and gives an error's message through a pointer,
//! so there is no global state. A null pointer where a value is needed, and a text that is not
//! UTF-8, are errors. No panic leaves a function. The caller frees results with the functions of
//! this library.

#![deny(unsafe_code)]

#[allow(
    unsafe_code,
    reason = "C callers pass pointers, which only unsafe code can read and write"
)]
mod abi;
mod status;
mod work;

pub use abi::*;
pub use status::Status;

// A crate that nothing refers to is left out by the linker, with the backends that it registers.
#[cfg(feature = "metal-backend")]
use metal_backend as _;
