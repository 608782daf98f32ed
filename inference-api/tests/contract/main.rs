//! The contract as an author or a user of backends meets it.

#![forbid(unsafe_code)]

mod async_tokens;
mod mock_backend;
mod optional_traits;
