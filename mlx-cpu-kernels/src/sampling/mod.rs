//! Tokens from rows of logits: penalties, filters, draws, and the passes over a vocabulary that
//! they need.

pub(crate) mod sample;
pub(crate) mod softmax_pass;
mod temperature_first;
pub(crate) mod top_k;
pub(crate) mod top_p;
mod typical;
