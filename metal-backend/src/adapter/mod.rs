//! The adapter of a model: its layers, parameters and files. `train/` trains adapters;
//! `nn/adapter.rs` computes adapted layers.

mod decoder;
mod files;
mod kind;
mod lora;
mod named;
mod naming;
mod part;
mod stored;

pub(crate) use decoder::{Adapted, Seen};
pub use kind::AdapterKind;
pub use lora::LoraAdapter;
pub use named::{NamedAdapter, NamedAdapters};
pub(crate) use naming::{key, same_layer};
pub(crate) use stored::Stored;
pub(crate) use stored::stored_bytes;
pub use stored::{CONFIG_FILE, WEIGHTS_FILE, hash_of_files};

/// Named arrays, sorted by name.
pub type Params = std::collections::BTreeMap<String, mlx_rs_core::Array>;
