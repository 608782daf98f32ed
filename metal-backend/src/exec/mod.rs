//! The only module that chooses between our CPU kernels and MLX's operations.
//!
//! Layers, caches, samplers and the loader describe their computation. Each file in this folder
//! accepts one kind of description, and decides whether our kernels support it. The file also
//! contains MLX's implementation, next to this choice. If MLX needs operations of other layers, the
//! file returns `None`, and the caller computes them.
//!
//! | File | Decision |
//! |---|---|
//! | `row_blocks.rs` | which GGUF blocks are packed directly by kernels |
//! | `weight.rs` | layout of a matrix in memory, and whether the loader keeps it quantized |
//! | `matrix.rs` | matrix multiplications, alone or fused with a norm and an epilogue |
//! | `norm.rs` | layer norms |
//! | `activation.rs` | which activation functions the kernels compute |
//! | `experts.rs` | multiplications by expert matrices, and the fused mixture of experts |
//! | `feature_rows.rs` | selected features of feed-forward blocks, from mapped files |
//! | `parallel.rs` | MLX's quantized multiplications on one stream or on two |
//! | `attention.rs` | which attention layers the kernels compute |
//! | `block.rs` | which complete decoder blocks the kernels compute |
//! | `recurrence.rs` | which recurrences the kernels compute |
//! | `sampling.rs` | kernels or MLX for sampling and log-probabilities |
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
