//! Tests of the server with a scripted backend: each API, access, models, start and stop.

#![forbid(unsafe_code)]

mod access;
mod call_or_json;
#[path = "../common/mod.rs"]
mod common;
mod defaults;
mod description;
mod forced;
#[path = "../../../tests/common/layering.rs"]
mod layering;
mod layers;
mod lifecycle;
mod models;
mod native;
mod openai;
mod other_apis;
mod page;
mod responses;
mod rounds;
mod strict;
mod thinking;
mod tools;
