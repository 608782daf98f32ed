//! Layouts of matrices and inputs in memory. No arithmetic on them.

pub(crate) mod packed;
