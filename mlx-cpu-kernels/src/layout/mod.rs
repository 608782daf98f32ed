//! Layouts of matrices and inputs in memory. These modules compute no products.

pub(crate) mod aligned;
pub(crate) mod blocks;
#[cfg(target_arch = "x86_64")]
pub(crate) mod byte_panel;
pub(crate) mod columns;
pub(crate) mod dense;
pub(crate) mod float_codes;
pub(crate) mod formats;
pub(crate) mod input_panel;
#[cfg(target_arch = "x86_64")]
pub(crate) mod integer_panel;
pub(crate) mod packed;
pub(crate) mod table;
pub(crate) mod tile;
