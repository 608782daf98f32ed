//! InternLM 3.

use super::{Defaults, Family, Windows, rename};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| rename(map, &[("qkv_bias", "attention_bias"), ("bias", "mlp_bias")]),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "internlm3",
        "InternLM3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
