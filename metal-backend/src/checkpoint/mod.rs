//! Model files as the engine reads them: the formats of `inference-formats`, with faults in the
//! contract's error type. `loader/` turns their bytes into MLX's arrays. MLX's own loaders are
//! never used: they invent data when a file is damaged.

pub mod files;

pub use inference_formats::{
    Family, Gguf, ModelConfig, ModelFiles, config, family, gguf, gguf_config, gguf_quant, identity,
    locate, python_json, safetensors,
};
