//! Kernels for aarch64: NEON, and the extension dotprod.

pub(crate) mod f32;
pub(crate) mod qgemv_dotprod;
