//! Model files as the engine reads them: the formats of `inference-formats`, with the contract's
//! errors. `loader/` turns their bytes into MLX's arrays. MLX's own loaders are never used: for
//! damaged files they return arbitrary data.

pub mod files;

pub use inference_formats::{
    Family, Gguf, ModelConfig, ModelFiles, config, family, gguf, gguf_config, identity, locate,
    python_json, quantization, safetensors,
};
