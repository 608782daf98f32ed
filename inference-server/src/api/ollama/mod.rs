//! Ollama's API: chat, generate, embed, the list of models, and what changes it.

pub(crate) mod embed;
pub(crate) mod generate;
pub(crate) mod manage;
pub(crate) mod models;
mod time;
mod types;
