//! Model files, as the crate `inference-formats` reads them. `loader/` turns their bytes into MLX's
//! arrays. MLX's own loaders are never used: they invent data when a file is damaged.

pub mod files;

pub use crate::loader as weights;
pub use inference_formats::{
    Gguf, ModelConfig, ModelFiles, config, gguf, gguf_config, gguf_quant, identity, locate,
    safetensors,
};
