//! Granite 3 with mixtures of experts.

use super::{Defaults, Family, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    ..Family::new(
        "granitemoe",
        "GraniteMoeForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
