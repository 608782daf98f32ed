//! MiMo.

use super::{Defaults, Family, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    // Layers for multi-token prediction. The engine does not use them.
    spare: &["model.mtp_layers."],
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "mimo",
        "MiMoForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
