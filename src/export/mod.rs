//! Exports models to formats of other tools: a directory with safetensors to a GGUF file.
//!
//! No array library is needed, because each tensor is read, reordered and rounded on its own.

mod blocks;
mod gguf;
mod metadata;
mod vocabulary;

pub use blocks::GgufType;
pub use gguf::{Exported, check_output, export_gguf};
pub use metadata::check_family;
