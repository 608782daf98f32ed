//! Reads model files without an engine: configurations, tensor headers and blocks. Also computes
//! how much memory a model needs.
//!
//! | Module | What it reads |
//! |---|---|
//! | [`config`] | `config.json` of transformers and mlx-lm, as one checked [`ModelConfig`] |
//! | [`family`] | values that the files of an architecture omit, and names of fields and tensors |
//! | [`safetensors`] | headers and the shard index of safetensors files; exact reads of tensors |
//! | [`gguf`] | GGUF headers, metadata and tensors, versions 2 and 3 |
//! | [`gguf_config`] | GGUF metadata as a [`ModelConfig`], tensor names, and parts of a tokenizer |
//! | [`quantization`] | the table of GGUF's types; blocks as `f32`, or packed without loss |
//! | [`npy`] | arrays of numpy |
//! | [`sentence`] | directories of sentence-transformers: modules after the network, prompts |
//! | [`footprint`] | bytes in memory of each tensor, from the headers |
//! | [`split`] | the part of each tensor that a process loads in tensor parallelism |
//! | [`pipeline`] | the layers that a process loads in pipeline parallelism |
//! | [`atomic`] | nothing; it replaces files atomically |
//! | [`discover`] | which models are in a directory |
//! | [`files`] | which files a model has; names that stay inside its directory |
//! | [`identity`] | a hash that identifies a model |
//! | [`hex`] | bytes in hexadecimal digits |
//!
//! This crate depends on no array library, no backend and no tokenizer. Its only computation is the
//! decoding of blocks; an engine copies the bytes into its arrays.
//!
//! Files are untrusted. Every length is compared with the file before memory is allocated. Names
//! cannot lead out of the model's directory. Reading executes no code and writes nothing. A
//! truncated or malformed file always causes an [`Error`], which names the file and, if possible,
//! the tensor.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!("model files are little-endian and are read without conversion");

pub mod atomic;
pub mod config;
pub mod discover;
mod error;
pub mod family;
pub mod files;
pub mod footprint;
mod generation;
pub mod gguf;
pub mod gguf_config;
mod identity;
pub mod limits;
pub mod npy;
pub mod pipeline;
pub mod python_json;
pub mod quantization;
pub mod safetensors;
pub mod sentence;
pub mod split;

pub use config::ModelConfig;
pub use error::{Error, ErrorKind, Result, write_line};
pub use family::Family;
pub use files::{ModelFiles, locate};
pub use generation::SamplingDefaults;
pub use gguf::Gguf;
pub use gguf_config::GgufTokenizerParts;
pub use identity::{hex, identity};
