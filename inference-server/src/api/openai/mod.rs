//! OpenAI's API: models, chat completions, completions, embeddings.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod responses;
pub(crate) mod stream;
pub(crate) mod types;
