//! Tests of tokenizers, templates and replies, against references and with damaged input.

#![forbid(unsafe_code)]

mod chat_templates;
mod first_model;
mod fuzz;
mod large_vocabulary;
mod reply;
