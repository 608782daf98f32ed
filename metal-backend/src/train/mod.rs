//! Fine-tuning: data, options and what learns from them.
//!
//! - [`dataset`]: JSONL files to token ids, loss masks and batches;
//! - [`config`]: the options of a run, from a YAML or TOML file.

pub mod config;
pub mod dataset;
