//! An HTTP server for language models. It uses the contract of `inference-api` and the reply
//! formats of `inference-text`. It depends on no engine, and not on MLX.
//!
//! [`Server`] serves models that are already loaded. A [`ModelSource`] loads further models by name
//! at their first request. The server implements the APIs of OpenAI, Anthropic and Ollama, and
//! limits everything that a client can request. One thread runs all requests of all models, in
//! their [`BatchSession`](inference::BatchSession)s.
//!
//! - `routes` combines the routes of all dialects; all handlers share `state`; `net` accepts
//!   connections; `auth` decides about access, and `middleware` enforces it.
//! - `engine` is the scheduler. It has a bounded queue and one thread, and recovers after a failed
//!   step.
//! - `pipeline` processes a request from its body to its reply. `dialect` has a folder for each
//!   API, with its requests, answers and routes.
//! - [`ToolHost`] runs tools for models, such as those of MCP servers.
//! - `ui` is the chat page at `/`, with its files.
//! - [`ReplyFormat`] describes how a model writes tool calls and reasoning. [`DetectedFormat`]
//!   detects the format from the model's chat template.
//!
//! Guarantees for clients: The server refuses an invalid request before any computation. If a
//! client disconnects, its request ends within one step. A reply that fails reports its failure.
//! When the server stops, running replies may complete within a time limit.

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
mod telemetry;
mod tools;
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
    CallOrJson, Delta, DetectedFormat, PlainText, ReasoningMarks, ReplyFormat, ReplyParser,
    ReplyRequest,
};
pub use tools::{ServerTools, ToolHost};
