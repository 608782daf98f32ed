//! Kernels without vector intrinsics. Their scalar functions are the definitions that the other
//! kernels follow.

pub(crate) mod dequantize;
pub(crate) mod microkernel;
pub(crate) mod qgemv;
#[cfg(target_arch = "x86_64")]
pub(crate) mod quantize_bytes;
#[cfg(target_arch = "x86_64")]
pub(crate) mod refine_bytes;
pub(crate) mod softmax;
pub(crate) mod vmath;
