//! Samples tokens from rows of logits: penalties, filters, draws, and their passes over the
//! vocabulary.

pub(crate) mod sample;
pub(crate) mod softmax_pass;
mod temperature_first;
pub(crate) mod top_k;
pub(crate) mod top_p;
mod typical;
