//! DeepSeek V3.2.

use serde_json::{Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, deepseek_v3, fill, routed};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| {
        fill(
            map,
            json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true,
                "first_k_dense_replace": 3, "index_topk": 2048, "index_head_dim": 128,
                "index_n_heads": 64}),
        );
    },
    reply: Some("deepseek_v31"),
    latent: true,
    gguf: Some(GgufFamily {
        architecture: "deepseek32",
        ..GGUF
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// GGUF files of models with indexers.
pub(super) const GGUF: GgufFamily = GgufFamily {
    read: indexed,
    overrides: deepseek_v3::names!(
        ("indexer.attn_q_b", "self_attn.indexer.wq_b"),
        ("indexer.attn_k", "self_attn.indexer.wk"),
        ("indexer.k_norm", "self_attn.indexer.k_norm"),
        ("indexer.proj", "self_attn.indexer.weights_proj"),
    ),
    ..deepseek_v3::GGUF
};

/// Reads the fields of a GGUF file whose layers have indexers.
pub(super) fn indexed(header: &GgufHeader<'_>) -> Result<Value> {
    const SELECTED: &str = "attention.indexer.top_k";
    let keys = &header.keys;
    if !header.has("indexer.attn_k.weight") {
        let message = "belongs to indexers, and the file has no tensors of them \
                       (blk.N.indexer.*); without them the model cannot run. A file that a current \
                       llama.cpp converted, or a directory of safetensors, has them";
        return Err(keys.unsupported(SELECTED, message));
    }
    let mut fields = deepseek_v3::read(header)?;
    fields["index_topk"] = json!(keys.required(SELECTED, limits::POSITIONS)?);
    let heads = keys.required("attention.indexer.head_count", limits::HEADS)?;
    fields["index_n_heads"] = json!(heads);
    let width = keys.required("attention.indexer.key_length", limits::HEAD_DIM)?;
    fields["index_head_dim"] = json!(width);
    if routed::scoring(header)?.is_none() {
        fields["scoring_func"] = json!("sigmoid");
    }
    Ok(fields)
}
