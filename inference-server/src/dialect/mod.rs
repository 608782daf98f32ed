//! The APIs, a folder each: what clients send, what they get back, and the routes.
//!
//! A handler's `#[utoipa::path]` says its method and path. A folder's `routes` lists the handlers;
//! the router and `/openapi.json` come from that list.

pub(crate) mod anthropic;
pub(crate) mod llama_cpp;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod responses;
