//! The checks, one file for each topic. Each is a function from a [`Context`](crate::context) to a
//! verdict; names and requirements are in `check.rs`.

pub(crate) mod classify;
pub(crate) mod close;
pub(crate) mod edits;
pub(crate) mod errors;
pub(crate) mod generate;
pub(crate) mod grammars;
pub(crate) mod interrupt;
pub(crate) mod load;
pub(crate) mod many;
pub(crate) mod meta;
pub(crate) mod prompt_cache;
pub(crate) mod sampling;
pub(crate) mod sessions;
pub(crate) mod steering;
pub(crate) mod stop;
pub(crate) mod threads;
pub(crate) mod tokens;
pub(crate) mod training;
pub(crate) mod undeclared;
pub(crate) mod vectors;
