//! GLM-5.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, deepseek_v32, fill};
use crate::error::Result;
use crate::gguf::{GgufArray, GgufValue};
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true, "q_lora_rank": 2048,
                "first_k_dense_replace": 3, "index_topk": 2048, "index_head_dim": 128,
                "index_n_heads": 32}),
        );
    },
    reply: Some("glm4_moe"),
    latent: true,
    gguf: Some(GgufFamily {
        read,
        architecture: "glm-dsa",
        ..deepseek_v32::GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. In GLM 5.2, layers share indexers. Its first files do not list
/// the layers with an indexer, so their longer context identifies them.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    const NAME: &str = "attention.indexer.types";
    const CONTEXT_OF_SHARING: usize = 1 << 20;
    let keys = &header.keys;
    let mut fields = deepseek_v32::indexed(header)?;
    match keys.metadata.get(&keys.key(NAME)) {
        None => {
            let context = keys.uint("context_length", 1, limits::POSITIONS)?;
            if context.is_some_and(|context| context >= CONTEXT_OF_SHARING) {
                fields["index_topk_freq"] = json!(4);
            }
        }
        Some(GgufValue::Array(GgufArray::Bool(own))) if own.len() >= header.layers => {
            let kind = |own: &bool| if *own { "full" } else { "shared" };
            let kinds: Vec<_> = own.iter().take(header.layers).map(kind).collect();
            fields["indexer_types"] = json!(kinds);
        }
        Some(_) => {
            let message = format!("must be a list of {} booleans", header.layers);
            return Err(keys.wrong(NAME, message));
        }
    }
    Ok(fields)
}
