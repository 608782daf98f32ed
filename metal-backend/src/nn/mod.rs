//! Layers that architectures share. They hold weights and compute; they read no files (that is
//! `checkpoint/`) and keep no state between calls (that is `cache/`).

pub mod activation;
pub mod adapter;
pub mod attention;
pub mod embedding;
pub mod fused;
pub mod linear;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod parallel;
pub mod rope;

pub use activation::Activation;
pub use attention::{Attention, HeadNorms};
pub use embedding::Embedding;
pub use fused::Fused;
pub use linear::{Linear, Weight};
pub use mlp::{FeedForward, GatedMlp, Mlp};
pub use moe::{ExpertLinear, Experts, Mixture, Router};
pub use norm::Norm;
pub use parallel::ParallelMatrix;
pub use rope::Rope;
