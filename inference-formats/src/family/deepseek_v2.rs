//! DeepSeek V2.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, deepseek_v3, fill};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"scoring_func": "softmax", "norm_topk_prob": false, "topk_method": "greedy"}),
        );
    },
    latent: true,
    gguf: Some(GgufFamily {
        is_variant: true,
        claims: Some((deepseek_v3::ARCHITECTURE, |header| {
            let scoring = deepseek_v3::scoring(header)?;
            Ok(scoring == Some("softmax") && !deepseek_v3::has_growth(header))
        })),
        read,
        ..deepseek_v3::GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. It has no key for `topk_method`, so the number of expert groups
/// determines this field.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let mut fields = deepseek_v3::read(header)?;
    fields["topk_method"] = match fields["n_group"].as_u64() {
        Some(groups) if groups > 1 => json!("group_limited_greedy"),
        _ => json!("greedy"),
    };
    Ok(fields)
}
