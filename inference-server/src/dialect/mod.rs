//! The HTTP APIs, one folder each: requests, answers and routes.
//!
//! A handler's `#[utoipa::path]` sets its method and path. A folder's `routes` lists the handlers.
//! The router and `/openapi.json` come from that list.

pub(crate) mod anthropic;
pub(crate) mod llama_cpp;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod responses;
