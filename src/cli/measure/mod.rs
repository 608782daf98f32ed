//! Commands that measure a model: speed, perplexity, logits and hidden states.

pub mod bandwidth;
pub mod bench;
pub mod logits;
pub mod perplexity;
#[cfg(feature = "probe")]
pub mod probe;
#[cfg(feature = "probe")]
pub mod trace;
#[cfg(feature = "probe")]
pub mod vindex;
