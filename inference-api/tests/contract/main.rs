//! Tests of the contract from both sides: backends that implement it, and programs that call it.

#![forbid(unsafe_code)]

mod async_tokens;
mod bindings;
mod mock_backend;
mod optional_traits;
