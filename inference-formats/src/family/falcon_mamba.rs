//! Falcon-Mamba.

use super::{Defaults, Family, GgufFamily, Recurrence, Windows, mamba};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: mamba::complete,
    recurrence: Recurrence::Every,
    gguf: Some(GgufFamily {
        is_variant: true,
        // Falcon Mamba has norms of the step sizes, B and C.
        claims: Some((mamba::ARCHITECTURE, |header| {
            let keys = &header.keys;
            let normed = keys.metadata.bool(&keys.key("ssm.dt_b_c_rms"))?;
            Ok(normed.unwrap_or(false))
        })),
        ..mamba::GGUF
    }),
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
