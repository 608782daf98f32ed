//! Layers that have a matrix memory per head instead of keys and values: mLSTM, the state spaces of
//! Mamba-2, and the gated delta rule. Positions are computed one at a time or in chunks.

pub(crate) mod chunk;
pub(crate) mod gates;
pub(crate) mod matrix_memory;
pub(crate) mod run;
#[cfg(test)]
mod run_tests;
pub(crate) mod step;
