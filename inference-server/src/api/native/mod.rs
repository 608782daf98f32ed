//! The routes of llama.cpp's server that its own clients use, and `/v1/infer`.

pub(crate) mod completion;
pub(crate) mod infer;
pub(crate) mod infill;
pub(crate) mod rerank;
pub(crate) mod state;
pub(crate) mod text;
