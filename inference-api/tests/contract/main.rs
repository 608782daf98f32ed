//! The contract as backends and programs use it.

#![forbid(unsafe_code)]

mod async_tokens;
mod mock_backend;
mod optional_traits;
