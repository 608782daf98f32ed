//! Layers that have a state instead of keys and values:
//!
//! - a matrix memory per head: mLSTM, Mamba-2 and the gated delta rule, computed one position at a
//!   time or in chunks;
//! - a matrix memory with a gate for each row: RWKV-7 and Kimi Delta Attention;
//! - a state per channel: Mamba;
//! - a scalar memory for each element: sLSTM.

pub(crate) mod chunk;
pub(crate) mod diagonal;
pub(crate) mod gates;
pub(crate) mod matrix_memory;
pub(crate) mod run;
#[cfg(test)]
mod run_tests;
pub(crate) mod scalar_memory;
pub(crate) mod selective;
pub(crate) mod step;
