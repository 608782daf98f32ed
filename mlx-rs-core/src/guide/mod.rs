//! The chapters of [MLX's own guide](https://ml-explore.github.io/mlx/build/html/index.html), for
//! Rust. Every snippet is compiled and run by the tests.
//!
//! | MLX | Here |
//! |---|---|
//! | Quick Start Guide, Conversion to NumPy and Other Frameworks | [`arrays`] |
//! | Lazy Evaluation | [`lazy_evaluation`] |
//! | Indexing Arrays | [`indexing`], and [`crate::indexing`] for reference |
//! | Function Transforms, Compilation, Exporting Functions | [`transforms`], and [`crate::transforms`] for reference |
//! | Custom Metal Kernels, Custom CUDA Kernels | [`crate::kernel`] |
//! | Saving and Loading Arrays | [`crate::io`] |
//! | Unified Memory, Using Streams | [`streams`] |
//! | Memory Management | [`memory`], and [`crate::memory`] for reference |
//!
//! [From Python to Rust](https://github.com/rust-mlx/rust-mlx/blob/main/docs/from-python.md) lists
//! the Rust form of each call of `mlx.core`.

#[doc = include_str!("arrays.md")]
pub mod arrays {}

#[doc = include_str!("lazy_evaluation.md")]
pub mod lazy_evaluation {}

#[doc = include_str!("indexing.md")]
pub mod indexing {}

#[doc = include_str!("transforms.md")]
pub mod transforms {}

#[doc = include_str!("streams.md")]
pub mod streams {}

#[doc = include_str!("memory.md")]
pub mod memory {}

/// The snippets of the guide in the repository's `docs/`.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/from-python.md")]
pub struct FromPython;
