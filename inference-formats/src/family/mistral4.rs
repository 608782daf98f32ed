//! Mistral 4.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, deepseek_v3, fill};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"scoring_func": "softmax", "n_group": 1, "topk_group": 1,
                "norm_topk_prob": true, "routed_scaling_factor": 1.0, "q_lora_rank": 1024,
                "n_shared_experts": 1, "first_k_dense_replace": 0,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0,
                    "original_max_position_embeddings": 8192, "beta_fast": 32.0,
                    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1}}),
        );
    },
    reply: Some("mistral_args"),
    latent: true,
    gguf: Some(GgufFamily {
        // Files that were converted from Mistral's own format have DeepSeek's architecture.
        claims: Some((deepseek_v3::ARCHITECTURE, |header| {
            Ok(deepseek_v3::has_growth(header))
        })),
        read,
        architecture: "mistral4",
        ..deepseek_v3::GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "mistral4",
        "Mistral4ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. Most files do not contain the growth of queries. Then it is
/// that of the published models.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    const USUAL_GROWTH: f32 = 0.1;
    let keys = &header.keys;
    let mut fields = deepseek_v3::read(header)?;
    let mut rotation = std::mem::take(&mut fields["rope_scaling"]);
    if rotation.is_object() {
        let growth = keys.positive("attention.temperature_scale")?;
        rotation["llama_4_scaling_beta"] = json!(growth.unwrap_or(USUAL_GROWTH));
        rotation["rope_theta"] = json!(keys.positive("rope.freq_base")?.unwrap_or(10_000.0));
        fields["rope_parameters"] = rotation;
    }
    Ok(fields)
}
