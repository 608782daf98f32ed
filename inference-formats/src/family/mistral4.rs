//! Mistral 4.

use serde_json::json;

use super::{Defaults, Family, Windows, fill};

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
    pipeline: false,
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
