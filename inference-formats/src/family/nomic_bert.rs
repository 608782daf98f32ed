//! Nomic BERT: BERT's blocks with rotary positions and a gated feed-forward part.

use serde_json::{Map, Value, json};

use super::gguf::GgufFamily;
use super::{Defaults, Family, Windows, fill};

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    encoder: true,
    pipeline: false,
    complete,
    gguf: Some(GgufFamily {
        activation: "swiglu",
        layer_norm: true,
        block: &[
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.out_proj"),
            ("attn_output_norm", "norm1"),
            // The name of the gate in GGUF files.
            ("ffn_gate", "mlp.fc12"),
            ("ffn_up", "mlp.fc11"),
            ("ffn_down", "mlp.fc2"),
            ("layer_output_norm", "norm2"),
        ],
        global: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "emb_ln"),
        ],
        prefix: "encoder.layers.",
        ..GgufFamily::new("nomic-bert")
    }),
    ..Family::new(
        "nomic_bert",
        "NomicBertModel",
        Defaults {
            norm_eps: 1e-12,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Copies the fields of the rotation to their usual names.
fn complete(map: &mut Map<String, Value>) {
    if let Some(base) = map.get("rotary_emb_base").filter(|v| !v.is_null()).cloned() {
        map.insert("rope_theta".to_owned(), base);
    }
    if let Some(part) = map.get("rotary_emb_fraction").filter(|v| !v.is_null()) {
        let part = part.clone();
        fill(map, json!({"partial_rotary_factor": part}));
    }
}
