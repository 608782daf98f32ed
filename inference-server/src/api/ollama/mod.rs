//! Ollama's API: chat, generate, embed, and the list of models. Models are loaded when the server
//! starts and stay: `keep_alive` is read and changes nothing.

pub(crate) mod embed;
pub(crate) mod generate;
pub(crate) mod models;
mod time;
mod types;
