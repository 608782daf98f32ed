//! Reads model files: the formats of `inference-formats`, with errors of the public contract.
//! `loader/` converts the bytes to MLX arrays. MLX's own loaders are never used, because they
//! return arbitrary data for damaged files.

pub mod files;

pub use inference_formats::{
    Family, Gguf, ModelConfig, ModelFiles, config, family, gguf, gguf_config, identity, locate,
    python_json, quantization, safetensors,
};
