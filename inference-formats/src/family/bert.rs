//! BERT, and models with its structure.

use serde_json::{Map, Value};

use super::gguf::GgufFamily;
use super::{Defaults, Family, Windows};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    encoder: true,
    pipeline: false,
    prepare: other_family,
    buffers: &[".position_ids"],
    gguf: Some(GgufFamily {
        activation: "gelu",
        layer_norm: true,
        block: BLOCK,
        global: GLOBAL,
        prefix: "encoder.layer.",
        ..GgufFamily::new("bert")
    }),
    ..Family::new("bert", "BertModel", DEFAULTS)
};

/// Sets the family of `jina_bert.rs`, if the configuration has its position encoding.
fn other_family(map: &mut Map<String, Value>) {
    let kind = map.get("position_embedding_type").and_then(Value::as_str);
    if kind == Some("alibi") {
        map.insert("model_type".to_owned(), "jina_bert".into());
    }
}

/// Values that configurations of BERT and related models omit.
pub(super) const DEFAULTS: Defaults = Defaults {
    norm_eps: 1e-12,
    // Positions are learned embeddings, so no code reads this value.
    rope_theta: 10_000.0,
    windows: Windows::Never,
};

/// Names inside a block: in GGUF files, and in transformers.
pub(super) const BLOCK: super::Names = &[
    ("attn_q", "attention.self.query"),
    ("attn_k", "attention.self.key"),
    ("attn_v", "attention.self.value"),
    ("attn_output", "attention.output.dense"),
    ("attn_output_norm", "attention.output.LayerNorm"),
    ("ffn_up", "intermediate.dense"),
    ("ffn_down", "output.dense"),
    ("layer_output_norm", "output.LayerNorm"),
];

/// Names of tensors outside of blocks.
pub(super) const GLOBAL: super::Names = &[
    ("token_embd", "embeddings.word_embeddings"),
    ("position_embd", "embeddings.position_embeddings"),
    ("token_types", "embeddings.token_type_embeddings"),
    ("token_embd_norm", "embeddings.LayerNorm"),
    ("cls", "classifier"),
    ("cls.output", "classifier.out_proj"),
];
