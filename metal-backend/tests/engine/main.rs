//! The engine's own parts: adapters, matrices of GGUF, sampling, training, the order of its rooms.

mod adapter_epochs;
mod gguf_blocks;
mod rooms;
mod samplers;
mod training;
#[path = "../training_common/mod.rs"]
mod training_common;
mod training_paths;
