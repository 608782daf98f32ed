//! The single place that chooses between our CPU kernels and MLX's operations.
//!
//! Layers, caches, samplers and the loader describe their computation. Each file in this folder
//! accepts one kind of description, and decides whether our kernels support it. The file also has
//! MLX's implementation. If MLX needs several operations of other layers, the file returns `None`,
//! and the caller computes these operations. There is one file per operation, so that each choice
//! is next to its alternatives.
//!
//! | File | What it decides |
//! |---|---|
//! | `row_blocks.rs` | which blocks of GGUF files kernels pack |
//! | `weight.rs` | layout of a matrix in memory, and whether the loader keeps it quantized |
//! | `matrix.rs` | matrix multiplications, alone or fused with a norm and an epilogue |
//! | `norm.rs` | layer norms |
//! | `activation.rs` | which activation functions the kernels have |
//! | `experts.rs` | multiplications by expert matrices, and the block of a mixture |
//! | `feature_rows.rs` | selected features of feed-forward parts, from mapped files |
//! | `parallel.rs` | quantized multiplications of MLX on one stream or on two |
//! | `attention.rs` | which attention layers the kernels have |
//! | `block.rs` | which whole decoder blocks the kernels have |
//! | `recurrence.rs` | which recurrences the kernels have |
//! | `sampling.rs` | kernels or MLX for samples and log-probabilities |
//!
//! No other module of the engine may name `mlx_rs_core::cpu`; `tests/engine/layers.rs` checks this.

pub mod activation;
mod attention;
mod block;
mod experts;
mod feature_rows;
mod matrix;
mod norm;
mod parallel;
pub mod recurrence;
mod row_blocks;
pub mod sampling;
mod weight;

pub use activation::Activation;
pub use attention::{
    AttentionSpec, Heads, KvBuffer, KvPacking, KvType, Locality, PlainView, RotarySpec, TokenRange,
    join_kv, pack_kv, unpack_kv,
};
pub use block::{Block, BlockSpec, KvSlot};
pub use experts::{ExpertGate, ExpertMatrix, ExpertPart, expert_block};
pub use feature_rows::{
    FeatureNumbers, FeatureParts, FeatureRows, copies_features, gate_products, greatest_features,
    only_features,
};
pub use matrix::{Epilogue, Matrix, NormSpec, Part, greatest, product_of, project};
pub use norm::layer_norm;
pub use row_blocks::RowBlocks;
pub use weight::{
    INTERLEAVED_ROWS, Weight, factors, interleaved, keeps_gguf_bits, keeps_half, keeps_packed,
    mapped, storage,
};

/// Whether the kernels are enabled, and the current stream is on the CPU.
///
/// # Errors
/// If MLX has no current stream.
pub fn on_kernels() -> mlx_rs_core::Result<bool> {
    use mlx_rs_core::{DeviceKind, Stream};
    let on_cpu = || Stream::current().map(|stream| stream.device().kind() == DeviceKind::Cpu);
    Ok(enabled() && on_cpu()?)
}

pub use mlx_rs_core::cpu::{
    MatrixParts, OPTIMIZED, Packer, PrefillInputs, enabled, status, threads,
};
