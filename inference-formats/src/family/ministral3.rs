//! Ministral 3, and the text part of Mistral Small 3 and Devstral.

use super::{Defaults, Family, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["mistral3"],
    ..Family::new(
        "ministral3",
        "Ministral3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};
