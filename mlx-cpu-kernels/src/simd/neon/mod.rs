//! Kernels for aarch64: NEON, and the extension dotprod. They call only functions of
//! `intrinsics.rs`. Tests on other processors run them with the plain Rust functions of
//! `emulation.rs`.

#[cfg(not(target_arch = "aarch64"))]
mod emulation;
pub(crate) mod f32;
mod intrinsics;
#[cfg(test)]
mod intrinsics_tests;
pub(crate) mod qgemv_dotprod;
