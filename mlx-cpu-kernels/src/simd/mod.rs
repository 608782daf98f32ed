//! Kernels of each instruction set, and the functions that choose among them.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod byte_tile;
#[cfg(target_arch = "x86_64")]
pub(crate) mod columns;
pub(crate) mod dense_rows;
pub(crate) mod dequantize;
pub(crate) mod flash_attention;
#[cfg(target_arch = "x86_64")]
pub(crate) mod integer_tile;
pub(crate) mod microkernel;
#[cfg(any(target_arch = "aarch64", test))]
pub(crate) mod neon;
pub(crate) mod pack_blocks;
pub(crate) mod portable;
pub(crate) mod prefetch;
pub(crate) mod qgemv;
pub(crate) mod transpose;
pub(crate) mod vmath;
