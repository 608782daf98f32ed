//! Tokenizers, templates and replies compared with references, and damaged input.

#![forbid(unsafe_code)]

mod chat_templates;
mod first_model;
mod fuzz;
mod large_vocabulary;
