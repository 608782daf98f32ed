//! Flags and files that several commands share: model loading, sampling, prompts, conversations,
//! presets, and names from other tools.

pub mod cache;
pub mod dialog;
pub mod engine;
#[cfg(feature = "mlx-backend")]
pub mod environment;
#[cfg(feature = "mlx-backend")]
pub mod files;
pub mod foreign;
pub mod grammar;
pub mod load;
pub mod mcp;
pub mod modelfile;
pub mod names;
pub mod parameters;
pub mod preset;
pub mod prompt;
pub mod records;
pub mod sampling;
pub mod settings;
pub mod steer;
pub mod tools;
