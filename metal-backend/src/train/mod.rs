//! Fine-tuning: data, options and what learns from them.
//!
//! - [`dataset`]: JSONL files to token ids, loss masks and batches;

pub mod dataset;
