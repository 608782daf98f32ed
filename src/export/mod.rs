//! Export of models to formats of other tools: a directory of safetensors to a GGUF file.
//!
//! No array library is needed: each tensor is read, reordered and rounded by itself.

mod blocks;
mod gguf;
mod metadata;
mod vocabulary;

pub use blocks::GgufType;
pub use gguf::{Exported, export_gguf};
