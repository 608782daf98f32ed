//! Commands that run a model: for one reply, a conversation, or many prompts.

pub mod batch;
pub mod cache_prompt;
pub mod chat;
pub mod chat_commands;
pub mod classify;
pub mod context;
pub mod embed;
pub mod generate;
pub mod infer;
pub mod reply;
pub mod rerank;
pub mod run;
pub mod session;
