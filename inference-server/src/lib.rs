//! A server for language models over HTTP. It uses the contract of `inference-api` and the reply
//! formats of `inference-text`, and depends on no engine and not on MLX.
//!
//! [`Server`] serves models that are already loaded. A [`ModelSource`] loads others by name at
//! their first request. The server answers OpenAI's, Anthropic's and Ollama's clients, and limits
//! everything that a client can request. One thread runs all requests of all models, in their
//! [`BatchSession`](inference::BatchSession)s.
//!
//! - `routes` joins the routes of all dialects; `state` is shared by the handlers; `net` accepts
//!   connections; `auth` decides about access, and `middleware` applies it.
//! - `engine` is the scheduler: a bounded queue, one thread, recovery from a failing step.
//! - `pipeline` takes a request from its body to its reply. `dialect` has a folder for each API,
//!   with its requests, answers and routes.
//! - `ui` is the page at `/`, with its files.
//! - [`ReplyFormat`] describes how a model writes tool calls and reasoning. [`DetectedFormat`]
//!   follows the model's chat template.
//!
//! Guarantees for clients: a request is refused before it costs anything. A client that disconnects
//! frees its place within a step. A reply that fails reports its failure. When the server stops,
//! running replies may end.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod auth;
mod config;
mod defaults;
mod dialect;
mod engine;
mod error;
mod limits;
mod measure;
mod metrics;
mod middleware;
mod models;
mod net;
mod openapi;
mod patience;
mod pipeline;
mod reply;
mod routes;
mod state;
mod status;
mod ui;

pub use config::Config;
pub use defaults::RequestDefaults;
pub use limits::Limits;
pub use models::{
    ModelDescription, ModelEntry, ModelSource, PullProgress, ServedModel, parse_keep_alive,
};
pub use net::Server;
pub use openapi::openapi_json;
pub use reply::{
    Delta, DetectedFormat, PlainText, ReasoningMarks, ReplyFormat, ReplyParser, ReplyRequest,
};
