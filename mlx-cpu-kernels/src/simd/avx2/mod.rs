//! Kernels for x86-64 with AVX2, FMA and F16C.

pub(crate) mod qgemv;
pub(crate) mod vmath;
