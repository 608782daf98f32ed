//! dots.llm1.

use serde_json::json;

use super::{Defaults, Family, GgufFamily, Windows, fill, routed};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": false}),
        );
    },
    // mlx-lm's names of stacked experts.
    names: &[
        (".mlp.experts.gate_proj.", ".mlp.switch_mlp.gate_proj."),
        (".mlp.experts.up_proj.", ".mlp.switch_mlp.up_proj."),
        (".mlp.experts.down_proj.", ".mlp.switch_mlp.down_proj."),
    ],
    gguf: Some(GgufFamily {
        optional_biases: true,
        read: |header| routed::read(header, &routed::SIGMOIDS),
        overrides: routed::names!(),
        unsuffixed: routed::CHOICE_BIAS,
        ..GgufFamily::new("dots1")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "dots1",
        "Dots1ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};
