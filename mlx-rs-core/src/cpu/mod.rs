//! The kernels of `mlx-cpu-kernels` as operations of MLX's graph: multiplication with quantized and
//! dense matrices, attention, recurrences, decoder blocks, and sampling from long rows. MLX
//! computes these on one core and without vector instructions. MLX still handles laziness, streams
//! and memory (through the shim of `mlx-sys`); the arithmetic is in `mlx-cpu-kernels`.
//!
//! For a single product, MLX's own operations compute `vmap` over rows, and gradients with respect
//! to the rows (and to a dense matrix). [`Matrix::product_for_gradients`] has a kernel for the
//! gradient instead. A gradient with respect to a quantized matrix or its scales is an error. A
//! gradient of a fused operation is also an error.
//!
//! `MLX_CPU_KERNELS=off` disables the kernels. `portable`, `avx2` and `avx512` limit the
//! instruction set.

mod attention;
mod decoder_block;
mod deferred;
mod dense;
mod diagonal_memory;
mod elementwise;
mod experts;
mod feature_walk;
mod gated;
mod greatest;
mod host_op;
mod kv_arena;
mod kv_buffer;
mod kv_packing;
mod layer_norm;
mod logits;
mod matrix;
mod matrix_arrays;
mod packed_formats;
mod packing;
mod projection;
mod quantized;
mod quantized_rows;
mod recurrence;
mod sample;
mod scalar_memory;
mod scanned;
mod selective_scan;
#[cfg(test)]
mod tests;
mod vjp;

pub use attention::{HeadNorm, Heads, KvView, Locality};
pub use decoder_block::{Biased, Block, KvSlot, RowNorm};
pub use deferred::{MatrixParts, Packer};
pub use dense::DenseMatrix;
pub use diagonal_memory::DiagonalMemory;
pub use elementwise::elementwise;
pub use experts::{BiasedExperts, ExpertBlock, ExpertMatrix};
pub use feature_walk::{FeatureMatrix, FeatureNumbers, FeatureWalk};
pub use gated::gated;
pub use kv_buffer::KvBuffer;
pub use kv_packing::{join_kv, pack_kv, unpack_kv};
pub use layer_norm::layer_norm;
pub use logits::{LogProbabilities, log_probabilities};
pub use matrix::Matrix;
pub use mlx_cpu_kernels::{
    BlockKind, CountPenalties, DrawParams, ExpertGate, Function, Gate, KvPacking, KvType,
    MAX_ROW_LEN, MemoryRule, OPTIMIZED, PackedBlockMut, Pick, PrefillInputs, RepetitionPenalty,
    Rotation, SampleParams, Table, TokenRange, enabled, instruction_set, pack_row_block,
    packs_row_blocks, status, threads,
};
pub use projection::{Epilogue, Projection};
pub use quantized::QuantizedMatrix;
pub use recurrence::{Memory, MemoryInputs};
pub use sample::{SampleRow, sample};
pub use scalar_memory::ScalarMemory;
pub use selective_scan::SelectiveScan;
