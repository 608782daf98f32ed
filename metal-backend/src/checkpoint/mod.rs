//! From files to named, shape-checked weights. Files are read here, in Rust, with every length
//! checked before it is believed; MLX's own loaders are never used, since they invent data when a
//! file is damaged. What the numbers mean to a network is the business of `arch/` and `nn/`.
//!
//! Nothing here executes, writes or leaves the model's directory, and allocation is bounded before
//! it happens. Only `weights.rs` builds MLX arrays.

#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian and are read without conversion");

#[path = "../../../inference-formats/src/config/mod.rs"]
pub mod config;
#[path = "../../../inference-formats/src/files/mod.rs"]
pub mod files;
#[path = "../../../inference-formats/src/gguf/mod.rs"]
pub mod gguf;
#[path = "../../../inference-formats/src/gguf_config/mod.rs"]
pub mod gguf_config;
#[path = "../../../inference-formats/src/gguf_quant/mod.rs"]
pub mod gguf_quant;
#[path = "../../../inference-formats/src/identity.rs"]
pub mod identity;
#[path = "../../../inference-formats/src/safetensors/mod.rs"]
pub mod safetensors;
pub mod weights;

pub use config::ModelConfig;
pub use files::{ModelFiles, locate};
pub use gguf::Gguf;
pub use gguf_config::GgufTokenizerParts;
