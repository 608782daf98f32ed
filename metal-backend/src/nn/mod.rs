//! Layers that architectures share. They hold weights and compute; they read no files (that is
//! `loader/`) and keep no state between calls (that is `cache/`).

pub mod adapter;
pub mod attention;
mod attention_mask;
pub mod causal_conv;
pub mod chunks;
pub mod delta_rule;
pub mod embedding;
pub mod feed_forward;
pub mod fused;
pub mod gated_attention;
pub mod gated_delta;
pub mod head_norm;
pub mod hooks;
pub mod linear;
pub mod mamba2;
pub mod mixer;
pub mod mlp;
pub mod mlstm;
pub mod mlstm_cell;
pub mod moe;
pub mod norm;
pub mod recurrence;
pub mod rope;
pub mod short_conv;
pub mod slstm;
pub mod ssd;

pub use crate::exec::{Activation, ParallelMatrix, Weight, activation};
pub use attention::{Attention, HeadNorms};
pub use causal_conv::CausalConv;
pub use embedding::Embedding;
pub use feed_forward::FeedForward;
pub use fused::Fused;
pub use gated_attention::GatedAttention;
pub use gated_delta::{GatedDelta, GatedDeltaShape};
pub use head_norm::HeadNorm;
pub use linear::Linear;
pub use mamba2::{Mamba2, Mamba2Shape};
pub use mixer::Mixer;
pub use mlp::{GatedMlp, Mlp};
pub use mlstm::{Mlstm, MlstmShape};
pub use moe::{ExpertLinear, Experts, Mixture, Router};
pub use norm::Norm;
pub use rope::Rope;
pub use short_conv::ShortConv;
pub use slstm::Slstm;
