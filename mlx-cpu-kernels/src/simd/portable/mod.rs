//! Kernels without vector intrinsics, and the scalar definitions that the others follow.

pub(crate) mod dequantize;
pub(crate) mod microkernel;
pub(crate) mod qgemv;
pub(crate) mod softmax;
pub(crate) mod vmath;
