//! Kernels for aarch64: NEON, and its extension dotprod. The kernels call only functions of
//! `intrinsics.rs`. In tests on other processors, the plain Rust functions of `emulation.rs`
//! replace them.

#[cfg(not(target_arch = "aarch64"))]
mod emulation;
pub(crate) mod f32;
mod intrinsics;
#[cfg(test)]
mod intrinsics_tests;
pub(crate) mod qgemv_dotprod;
