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

mod back;
mod block;
mod choose;
mod heads;
mod host_op;
mod matrix;
mod memory;
mod project;
mod quantized;
mod select;
mod slab;
#[cfg(test)]
mod tests;
mod top_p;

pub use block::{Biased, Block, Room, RowNorm};
pub use choose::{Row, choose};
pub use heads::{HeadNorm, Heads, Lane};
pub use matrix::{DenseMatrix, Matrix};
pub use memory::KvMemory;
pub use mlx_cpu_kernels::{
    CountPenalties, DrawParams, Gate, MAX_ROW_LEN, Pick, RepetitionPenalty, Rotation, TokenRange,
    enabled, instruction_set, status, threads,
};
pub use project::{Projection, Then};
pub use quantized::QuantizedMatrix;
pub use select::{Greatest, LogProbabilities, draw, greatest, log_probabilities};
pub use top_p::top_p;
