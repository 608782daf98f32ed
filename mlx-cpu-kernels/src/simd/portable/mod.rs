//! Kernels without instructions of their own, and the scalar definitions of the others.

pub(crate) mod dequantize;
pub(crate) mod microkernel;
pub(crate) mod qgemv;
pub(crate) mod softmax;
pub(crate) mod vmath;
