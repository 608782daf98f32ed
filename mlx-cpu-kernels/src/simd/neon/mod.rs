//! Kernels for aarch64: NEON, and the extension dotprod. They call only what `intrinsics.rs` names.
//! Tests on other processors run them with the same functions in plain Rust, from `emulation.rs`.

#[cfg(not(target_arch = "aarch64"))]
mod emulation;
pub(crate) mod f32;
mod intrinsics;
#[cfg(test)]
mod intrinsics_tests;
pub(crate) mod qgemv_dotprod;
