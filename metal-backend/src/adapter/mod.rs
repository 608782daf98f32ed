//! The adapter of a model: the layers it stands at, its numbers, and its files. How it is trained
//! is in `train/`; what a layer computes with it is in `nn/adapter.rs`.

mod files;
mod lora;

pub use files::{CONFIG_FILE, WEIGHTS_FILE};
pub(crate) use files::{Stored, key, same_layer};
pub use lora::{AdapterKind, LoraAdapter};

/// Named arrays, sorted by name.
pub type Params = std::collections::BTreeMap<String, mlx_rs_core::Array>;
