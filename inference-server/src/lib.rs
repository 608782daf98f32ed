//! Language models over HTTP, on the contract of `inference-api` and the reply formats of
//! `inference-text`. It has no engine and no MLX.
//!
//! [`Server`] serves models that are loaded already, and those that a [`ModelSource`] loads by name
//! when they are first asked for. It answers OpenAI's, Anthropic's and Ollama's clients, and bounds
//! everything that a client can ask for. All requests of all models run on one thread over their
//! [`BatchSession`](inference::BatchSession)s.
//!
//! - `routes` joins the routes of all dialects; `state` is what handlers share; `net` accepts
//!   connections; `auth` says who may ask, and `middleware` asks it.
//! - `engine` is the scheduler: a bounded queue, one thread, recovery from a failing step.
//! - `pipeline` takes a request from its body to its reply. `dialect` has a folder for each API:
//!   what clients send and get, and the routes.
//! - `ui` is the page at `/`, with its files.
//! - [`ReplyFormat`] is how a model writes tool calls and reasoning. [`DetectedFormat`] follows the
//!   model's chat template.
//!
//! Guarantees for clients: a request that is refused is refused before it costs anything. A client
//! that leaves frees its place within a step. A reply that fails says so. A stop of the server lets
//! running replies end.

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
