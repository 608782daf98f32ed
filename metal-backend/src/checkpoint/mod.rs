//! From model files to named, shape-checked weights. The formats are read by `inference-formats`;
//! `weights/` turns their bytes into MLX's arrays. MLX's own loaders are never used: they invent
//! data when a file is damaged.

pub mod files;
pub mod weights;

pub use inference_formats::{
    Gguf, ModelConfig, ModelFiles, config, gguf, gguf_config, gguf_quant, identity, locate,
    safetensors,
};
