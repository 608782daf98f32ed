//! The checks, one file per topic. Each check is a function from a [`Context`](crate::context) to a
//! verdict. `check.rs` has names and requirements.

pub(crate) mod adapters;
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
