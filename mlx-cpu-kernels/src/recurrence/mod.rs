//! Layers that have a state instead of keys and values. A matrix memory per head: mLSTM, the state
//! spaces of Mamba-2, and the gated delta rule; positions are computed one at a time or in chunks.
//! A matrix memory with a gate for each row: RWKV-7, Kimi Delta Attention. A state per channel:
//! Mamba. A scalar memory for each element: sLSTM.

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
