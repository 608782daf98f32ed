//! Tests parts of the engine: adapters, GGUF matrices, sampling, training, and module order.

mod adapter_epochs;
#[path = "../../../tests/common/alone.rs"]
mod alone;
mod gguf_blocks;
mod layers;
mod samplers;
mod training;
#[path = "../training_common/mod.rs"]
mod training_common;
mod training_encoders;
mod training_formats;
mod training_paths;
mod training_preferences;
mod training_rewards;
