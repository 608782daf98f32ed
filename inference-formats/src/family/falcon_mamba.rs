//! Falcon-Mamba.

use super::{Defaults, Family, Recurrence, Windows, mamba};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: mamba::complete,
    recurrence: Recurrence::Every,
    ..Family::new(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
