//! Multiplication of rows with quantized and dense matrices, for one row to whole prompts.

pub(crate) mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_gemm_bf16;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_qgemm;
#[cfg(target_arch = "x86_64")]
pub(crate) mod byte_gemm;
#[cfg(all(test, target_arch = "x86_64"))]
mod byte_gemm_tests;
pub(crate) mod column_product;
pub(crate) mod dense;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dense_gemm;
pub(crate) mod elementwise;
pub(crate) mod expert_block;
pub(crate) mod experts;
pub(crate) mod feature_walk;
pub(crate) mod few_rows;
#[cfg(test)]
mod format_tests;
pub(crate) mod gated;
pub(crate) mod gather_rows;
pub(crate) mod greatest;
#[cfg(target_arch = "x86_64")]
pub(crate) mod integer_gemm;
pub(crate) mod layer_norm;
pub(crate) mod packed_gemm;
pub(crate) mod prefetch;
pub(crate) mod product;
pub(crate) mod routes;
pub(crate) mod run;
pub(crate) mod vjp;
