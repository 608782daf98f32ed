//! Layers that architectures share. They hold weights and compute; they read no files (that is
//! `checkpoint/`) and keep no state between calls (that is `cache/`).

pub mod attention;
pub mod embedding;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod parallel;
pub mod rope;

pub use attention::Attention;
pub use embedding::Embedding;
pub use linear::{Linear, Weight};
pub use mlp::GatedMlp;
pub use norm::RmsNorm;
pub use parallel::ParallelMatrix;
pub use rope::Rope;
