//! Kernels for aarch64: NEON, and the extension dotprod.

pub(crate) mod kernels;
pub(crate) mod qgemv_dotprod;
