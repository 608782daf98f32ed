//! Kernels of our own for CPUs in MLX's graph: products with quantized and dense matrices, which MLX
//! computes on one core and without the processor's vector units, attention and whole decoder blocks, and
//! choices from long rows. The kernels are the crate `mlx-cpu-kernels`; here they become operations (the
//! shim of `mlx-sys`), so laziness, streams and memory stay MLX's.
//!
//! MLX's own operations compute their derivatives with respect to the rows (and to a dense matrix), and
//! batches of rows under `vmap`, unless [`Matrix::product_for_gradients`] is asked for. A gradient with
//! respect to a quantized matrix or its scales is an error, and so is one of a fused operation.
//!
//! `MLX_CPU_KERNELS=off` turns the kernels off, `MLX_CPU_KERNELS=portable` keeps them from the processor's
//! wider vectors, `avx2` from AVX-512, `avx512` from AMX.

mod attention;
mod decoder_block;
mod host_op;
mod kv_arena;
mod kv_buffer;
mod logits;
mod matrix;
mod projection;
mod quantized;
mod sample;
#[cfg(test)]
mod tests;
mod top_p;
mod vjp;

pub use attention::{HeadNorm, Heads, Lane};
pub use decoder_block::{Biased, Block, Room, RowNorm};
pub use kv_buffer::KvMemory;
pub use logits::{Greatest, LogProbabilities, draw, greatest, log_probabilities};
pub use matrix::{DenseMatrix, Matrix};
pub use mlx_cpu_kernels::{
    CountPenalties, DrawParams, Gate, MAX_ROW_LEN, Pick, RepetitionPenalty, Rotation, TokenRange,
    enabled, instruction_set, status, threads,
};
pub use projection::{Projection, Then};
pub use quantized::QuantizedMatrix;
pub use sample::{Row, choose};
pub use top_p::top_p;
