//! Kernels for x86-64 with AVX2, FMA and F16C.

pub(crate) mod byte_quads;
pub(crate) mod byte_tile;
pub(crate) mod columns;
pub(crate) mod decode_attention;
pub(crate) mod dense_rows;
pub(crate) mod dequantize;
pub(crate) mod flash_attention;
pub(crate) mod float_codes;
pub(crate) mod integer_codes;
pub(crate) mod integer_pairs;
pub(crate) mod integer_tile;
pub(crate) mod microkernel;
pub(crate) mod pack_blocks;
pub(crate) mod qgemv;
pub(crate) mod qgemv_fp8;
pub(crate) mod quantize_inputs;
pub(crate) mod transpose;
pub(crate) mod vmath;
