//! Layouts of matrices and inputs in memory. No arithmetic on them.

pub(crate) mod aligned;
pub(crate) mod float_codes;
pub(crate) mod input_panel;
pub(crate) mod packed;
pub(crate) mod table;
pub(crate) mod tile;
