//! Tokenizer and chat templates: the crate `rust-mlx-inference-text`.

pub use inference_text::*;

#[cfg(test)]
pub(crate) use inference_text::testing as test_support;
