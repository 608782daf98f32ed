//! The single place that chooses between our CPU kernels and MLX's operations.
//!
//! Layers, caches, samplers and the loader describe their computation. Each file here takes one
//! kind of description and decides whether the kernels support it. It has both implementations. If
//! MLX's implementation consists of several layers, it returns `None`, and the caller computes
//! them. There is one file per operation, so that a choice and its alternatives are together.
//!
//! | File | What it decides |
//! |---|---|
//! | `weight.rs` | the layout of a matrix in memory, and what the loader keeps packed |
//! | `matrix.rs` | one product, and several with a norm before and an epilogue behind |
//! | `norm.rs` | layer norms |
//! | `activation.rs` | which activations are gates of the kernels |
//! | `experts.rs` | products by index, and the block of a mixture |
//! | `feature_rows.rs` | features of feed-forward parts by number, from mapped files |
//! | `parallel.rs` | quantized products of MLX on one stream or two |
//! | `attention.rs` | which attention layers the kernels have |
//! | `block.rs` | which whole decoder blocks they have |
//! | `recurrence.rs` | which recurrences they have |
//! | `sampling.rs` | who draws tokens and finds log-probabilities |
//!
//! No other module of the engine names `mlx_rs_core::cpu`; `tests/layering.rs` fails on one that
//! does.

pub mod activation;
mod attention;
mod block;
mod experts;
mod feature_rows;
mod matrix;
mod norm;
mod parallel;
pub mod recurrence;
pub mod sampling;
mod weight;

pub use activation::Activation;
pub use attention::{AttentionSpec, Heads, KvBuffer, PlainView, RotarySpec, TokenRange};
pub use block::{Block, BlockSpec, KvSlot};
pub use experts::{ExpertGate, ExpertMatrix, ExpertPart, expert_block};
pub use feature_rows::{
    FeatureNumbers, FeatureParts, FeatureRows, copies_features, gate_products, greatest_features,
    only_features,
};
pub use matrix::{Epilogue, Matrix, NormSpec, Part, greatest, project};
pub use norm::layer_norm;
pub use weight::{
    INTERLEAVED_ROWS, Weight, factors, interleaved, keeps_gguf_bits, keeps_half, keeps_packed,
    storage,
};

pub use mlx_rs_core::cpu::{OPTIMIZED, PrefillInputs, enabled, status, threads};
