//! Gemma 3n: text models, and the text part of multimodal ones.

use serde_json::{Map, Value, json};

use super::gguf::{SANDWICH, TANH_GELU};
use super::{ChatFormat, Defaults, Family, GgufFamily, GgufHeader, Names, Windows, fill, is_set};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    prepare,
    complete,
    multimodal: &["gemma3n"],
    chat: Some(ChatFormat::Gemma),
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        // GGUF files have one stack where directories have a projection for each residual stream.
        runs_only: true,
        layers_differ: true,
        read,
        overrides: SANDWICH,
        block: BLOCK,
        unsuffixed: &[("altup_correct_scale.weight", "altup.correct_output_scale")],
        global: &[
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("output", "lm_head"),
            ("per_layer_token_embd", "model.embed_tokens_per_layer"),
            ("per_layer_model_proj", "model.per_layer_model_projection"),
            ("per_layer_proj_norm", "model.per_layer_projection_norm"),
            ("altup_proj", "model.altup_projections"),
            ("altup_unembd_proj", "model.altup_unembed_projections"),
        ],
        ..GgufFamily::new("gemma3n")
    }),
    pipeline: false,
    ..Family::new(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 1e6,
            windows: Windows::AllBut {
                every: 5,
                last_is_full: false,
            },
        },
    )
};

/// Names inside the blocks of GGUF files.
const BLOCK: Names = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("altup_router", "altup.modality_router"),
    ("altup_router_norm", "altup.router_norm"),
    ("altup_predict_coef", "altup.prediction_coefs"),
    ("altup_correct_coef", "altup.correction_coefs"),
    ("laurel_l", "laurel.linear_left"),
    ("laurel_r", "laurel.linear_right"),
    ("laurel_post_norm", "laurel.post_laurel_norm"),
];

/// Reads the fields of a GGUF file.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let rows = |name: &str| header.file.tensors().get(name)?.shape.first().copied();
    let widths = header.by_layer("feed_forward_length", (1, limits::INTERMEDIATE))?;
    let widths = widths.ok_or_else(|| keys.metadata.missing(&keys.key("feed_forward_length")))?;
    let key = keys.key("activation_sparsity_scale");
    let scales = keys.metadata.f32s(&key)?;
    let scales = scales.ok_or_else(|| keys.metadata.missing(&key))?;
    // A scale of negative infinity means that the layer is not sparse.
    let scales: Vec<_> = (scales.iter())
        .map(|scale| scale.is_finite().then_some(*scale))
        .collect();
    let width = "embedding_length_per_layer_input";
    Ok(json!({
        "intermediate_size": widths.iter().max(),
        "intermediate_sizes": widths,
        "activation_sparsity_scale": scales,
        "layer_types": header.layer_types()?,
        "sliding_window": header.window()?,
        "rope_local_base_freq": keys.positive("rope.freq_base_swa")?.unwrap_or(10_000.0),
        "num_kv_shared_layers":
            keys.uint("attention.shared_kv_layers", 0, header.layers)?.unwrap_or(0),
        "hidden_size_per_layer_input": keys.required(width, limits::HIDDEN)?,
        "vocab_size_per_layer_input": rows("per_layer_token_embd.weight"),
        "altup_num_inputs": keys.required("altup.num_inputs", limits::HEADS)?,
        "altup_active_idx": keys.uint("altup.active_idx", 0, limits::HEADS)?,
        "laurel_rank": rows("blk.0.laurel_l.weight"),
        "final_logit_softcapping": keys.positive("final_logit_softcapping")?,
    }))
}

/// Layers may have different feed-forward widths. `intermediate_size` becomes the greatest.
fn prepare(map: &mut Map<String, Value>) {
    if let Some(Value::Array(widths)) = map.get("intermediate_size").cloned() {
        if let Some(widest) = widths.iter().filter_map(Value::as_u64).max() {
            map.insert("intermediate_size".into(), json!(widest));
        }
        map.insert("intermediate_sizes".into(), widths.into());
    }
}

fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256, "sliding_window": 512,
            "rope_local_base_freq": 1e4, "num_kv_shared_layers": 15, "laurel_rank": 64,
            "altup_num_inputs": 4, "altup_active_idx": 0, "final_logit_softcapping": 30.0,
            "tie_word_embeddings": true}),
    );
    // In models with more than 10 layers, the gates of the first 10 are sparse.
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "activation_sparsity_pattern")
    {
        let sparse = if layers > 10 { 10 } else { 0 };
        let shares = (0..layers).map(|layer| if layer < sparse { 0.95 } else { 0.0 });
        let shares: Vec<f64> = shares.collect();
        map.insert("activation_sparsity_pattern".into(), shares.into());
    }
}
