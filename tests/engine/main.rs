//! Tests of models through the contract: golden values, requests, caches, sampling, inspection.

mod adapters;
#[path = "../common/alone.rs"]
mod alone;
mod attention_sums;
mod cache_dir;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod encoders;
mod examples;
mod exit;
mod feed_forward;
mod ffn_backends;
mod first_model;
mod generation;
mod gguf_families;
mod gguf_fused;
mod gguf_quantized;
mod golden;
mod inspection;
mod kernels;
mod kv_bits;
mod longrope;
mod many;
mod not_numbers;
mod precision;
mod profile;
#[path = "../common/program.rs"]
mod program;
mod prompt_cache;
mod real_models;
mod recurrent;
mod replies;
mod requests;
mod same_bits;
mod sampling;
mod steering;
mod trace;
mod transformers5;
mod vindex_alone;
mod vindex_walk;
mod walk_only;
