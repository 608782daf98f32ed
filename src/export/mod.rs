//! Models written in the format of other tools: a directory of safetensors as a GGUF file.
//!
//! No array library takes part: tensors are read, their rows reordered, and numbers rounded one
//! tensor at a time.

mod blocks;
mod gguf;
mod metadata;
mod vocabulary;

pub use blocks::GgufType;
pub use gguf::{Exported, export_gguf};
