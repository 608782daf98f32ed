//! `JinaBERT`: BERT's blocks with `ALiBi` instead of learned positions, and usually a gated
//! feed-forward part. A `config.json` says `bert` and names the position encoding; `bert.rs`
//! then changes the family.

use serde_json::{Value, json};

use super::gguf::{GgufFamily, GgufHeader};
use super::{Family, bert};
use crate::error::Result;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    encoder: true,
    pipeline: false,
    buffers: &[".position_ids"],
    gguf: Some(GgufFamily {
        activation: "gelu",
        layer_norm: true,
        // Some converters divide the fused matrix of gate and up projections, others do not.
        runs_only: true,
        read,
        block: &[
            ("attn_q", "attention.self.query"),
            ("attn_k", "attention.self.key"),
            ("attn_v", "attention.self.value"),
            ("attn_q_norm", "attention.self.layer_norm_q"),
            ("attn_k_norm", "attention.self.layer_norm_k"),
            ("attn_output", "attention.output.dense"),
            ("attn_output_norm", "attention.output.LayerNorm"),
            ("attn_norm_2", "layer_norm_1"),
            ("ffn_gate", "mlp.gate_layer"),
            ("ffn_up", "mlp.gated_layers"),
            ("ffn_down", "mlp.wo"),
            ("layer_output_norm", "mlp.layernorm"),
        ],
        global: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "embeddings.LayerNorm"),
            ("cls", "classifier"),
        ],
        prefix: "encoder.layer.",
        ..GgufFamily::new("jina-bert-v2")
    }),
    ..Family::new("jina_bert", "JinaBertModel", bert::DEFAULTS)
};

/// Files do not state the kind of the feed-forward part. A gated one has a matrix for its gate, or
/// twice the rows.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let width = header
        .keys
        .required("feed_forward_length", crate::limits::INTERMEDIATE)?;
    let up = header.file.tensors().get("blk.0.ffn_up.weight");
    let wide = up
        .and_then(|up| up.shape.first())
        .is_some_and(|rows| *rows > width);
    let gated = wide || header.has("ffn_gate.weight");
    Ok(json!({
        "position_embedding_type": "alibi",
        "hidden_act": "gelu",
        "feed_forward_type": if gated { "geglu" } else { "original" },
    }))
}
