//! Kernels for x86-64 with AVX-512 F, BW and VNNI.

pub(crate) mod byte_tile;
pub(crate) mod columns;
pub(crate) mod dense_rows;
pub(crate) mod flash_attention;
pub(crate) mod integer_pairs;
pub(crate) mod integer_tile;
pub(crate) mod microkernel;
pub(crate) mod qgemv;
pub(crate) mod qgemv_fp8;
pub(crate) mod transpose;
pub(crate) mod vmath;
