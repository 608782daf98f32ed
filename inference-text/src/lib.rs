//! Converts text to token ids and back: the tokenizer, the chat template and the streaming
//! detokenizer of a model.
//!
//! - [`Tokenizer`]: loads `tokenizer.json` or GGUF metadata. It encodes and decodes text, and adds
//!   the tokens that begin and end a text.
//! - [`ChatTemplate`]: renders a conversation as text, with the model's own template or with the
//!   published format of its family.
//! - [`TextPipeline`]: combines both. Text of a message never becomes a control token.
//! - [`reply`]: splits a streamed reply into content, reasoning and tool calls.
//! - [`Detokenizer`]: converts a stream of ids to text in whole characters, and detects stop
//!   strings.
//!
//! This crate does not depend on arrays, networks or backends. The caller must check ids against
//! the rows of the embedding. The decode loop handles stop *tokens*.
//!
//! Vocabularies and templates are untrusted. [`TextLimits`] limits the memory and time that they
//! may use. A template runs in a sandbox: it cannot open files or include other templates. Unusable
//! input causes an error.

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
mod tokenizer_gguf_words;
mod tokenizer_greedy;
mod tokenizer_wordpiece;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use bounded::Encoded;
pub use chat_template::{ChatOptions, ChatTemplate};
pub use detokenizer::{Detokenizer, Released};
pub use limits::TextLimits;
pub use pieces::byte_token;
pub use pipeline::TextPipeline;
pub use tokenizer::Tokenizer;
