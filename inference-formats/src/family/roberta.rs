//! RoBERTa, and the same network with the vocabulary of XLM: BERT's blocks, position numbers that
//! begin after the padding position, and a different classifier.

use super::bert::DEFAULTS;
use super::{Defaults, Family};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    encoder: true,
    pipeline: false,
    buffers: &[".position_ids"],
    ..Family::new("roberta", "RobertaModel", OWN_DEFAULTS)
};

/// The descriptor of XLM-RoBERTa.
pub static XLM: Family = Family {
    encoder: true,
    pipeline: false,
    buffers: &[".position_ids"],
    ..Family::new("xlm-roberta", "XLMRobertaModel", OWN_DEFAULTS)
};

const OWN_DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-12,
    ..DEFAULTS
};
