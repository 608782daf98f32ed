//! Converts text to token ids and back: the tokenizer, the chat template and the streaming
//! detokenizer of a model.
//!
//! - [`Tokenizer`]: from `tokenizer.json` or from GGUF metadata. It encodes, decodes, and knows the
//!   tokens that begin and end a text.
//! - [`ChatTemplate`]: lays a conversation out as text, with the model's own template or with the
//!   published format of its family.
//! - [`TextPipeline`]: both together. No text of a message becomes a control token.
//! - [`reply`]: a reply as content, reasoning and tool calls, as it streams.
//! - [`Detokenizer`]: ids to text as they arrive, in whole characters, with stop strings.
//!
//! This crate does not depend on arrays, networks or backends. Its caller compares ids with the
//! rows of the embedding. The decode loop handles stop *tokens*.
//!
//! Vocabularies and templates are untrusted. [`TextLimits`] limits the memory and time that they
//! can take. A template runs in a sandbox: it opens no file and includes no other template. What
//! cannot be used is an error.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod bounded;
mod chat_template;
mod detokenizer;
mod limits;
mod pieces;
mod pipeline;
pub mod reply;
mod template_defaults;
mod template_env;
mod template_guard;
mod template_python;
mod template_time;
mod tokenizer;
mod tokenizer_files;
mod tokenizer_gguf;
mod tokenizer_wordpiece;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bounded::Encoded;
pub use chat_template::{ChatOptions, ChatTemplate};
pub use detokenizer::{Detokenizer, Released};
pub use limits::TextLimits;
pub use pipeline::TextPipeline;
pub use tokenizer::Tokenizer;
