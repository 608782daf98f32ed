//! Text to ids and ids to text.
//!
//! - [`Tokenizer`]: from `tokenizer.json` or from GGUF metadata; encodes, decodes, knows begin and end tokens.
//! - [`ChatTemplate`]: lays a conversation out as text, with the model's own template or its family's format.
//! - [`TextPipeline`]: both together; what users say never becomes control tokens.
//! - [`Detokenizer`]: ids to text as they come, whole characters only, with stop strings.
//!
//! Vocabularies and templates come from strangers: [`TextLimits`] bounds what they can cost, and bad ones are
//! errors. No arrays and no model here; ids are checked against the model's rows where they are used.

mod chat_template;
mod detokenizer;
mod limits;
mod pieces;
mod pipeline;
mod template_defaults;
mod template_env;
mod template_guard;
mod template_python;
mod template_time;
mod tokenizer;
mod tokenizer_files;
mod tokenizer_gguf;

#[cfg(test)]
pub(crate) mod test_support;

pub use chat_template::{ChatOptions, ChatTemplate};
pub use detokenizer::{Detokenizer, Released};
pub use limits::TextLimits;
pub use pipeline::TextPipeline;
pub use tokenizer::Tokenizer;
