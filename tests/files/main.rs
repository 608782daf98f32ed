//! Tests of model files: damaged, hostile, in other layouts, converted or exported.

#[path = "../common/mod.rs"]
mod common;
mod convert;
mod export_gguf;
mod export_tokenizer;
mod hostile;
mod hostile_matrix;
mod layouts;
mod learned;
mod packed;
#[path = "../common/program.rs"]
mod program;
