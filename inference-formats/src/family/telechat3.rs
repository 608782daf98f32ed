//! TeleChat 3.

use super::{Defaults, Family, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "telechat3",
        "Telechat3ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
