//! Gemma 4: text models, and the text part of multimodal ones.

use serde_json::{Map, Value, json};

use super::gguf::{TANH_GELU, add};
use super::{ChatFormat, Defaults, Family, GgufFamily, GgufHeader, Windows, fill};
use crate::error::Result;
use crate::files::invalid;
use crate::limits;
use crate::quantization::dequantize;

/// Rotary base of sliding layers, for files whose metadata do not contain it.
const LOCAL_BASE: f32 = 10_000.0;

/// A pair of elements with a factor of at least this counts as not rotating.
const STILL: f32 = 1e20;

/// The tensor with the factors of rotary wavelengths in full layers. The factor is 1 for pairs that
/// rotate.
const FACTORS: &str = "rope_freqs.weight";

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    multimodal: &["gemma4", "gemma4_unified"],
    complete: |map| {
        fill(
            map,
            json!({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
                "hidden_size_per_layer_input": 256, "sliding_window": 512,
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                        "partial_rotary_factor": 0.25},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        );
    },
    chat: Some(ChatFormat::Gemma),
    reply: Some("gemma4"),
    gguf: Some(GgufFamily {
        activation: TANH_GELU,
        activation_field: "hidden_activation",
        layers_differ: true,
        read,
        overrides: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
            ("layer_output_scale", "layer_scalar"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
            ("ffn_gate_inp", "router.proj"),
            ("ffn_gate_up_exps", "experts.gate_up_proj"),
            ("ffn_down_exps", "experts.down_proj"),
        ],
        unsuffixed: &[
            ("ffn_gate_inp.scale", "router.scale"),
            ("ffn_down_exps.scale", "router.per_expert_scale"),
        ],
        global: &[
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("output", "lm_head"),
            ("per_layer_token_embd", "model.embed_tokens_per_layer"),
            ("per_layer_model_proj", "model.per_layer_model_projection"),
            ("per_layer_proj_norm", "model.per_layer_projection_norm"),
        ],
        ..GgufFamily::new("gemma4")
    }),
    pipeline: false,
    tensor_parallel: super::TensorParallel::Heads,
    joined_experts: super::JoinedExperts::stacks(".experts.switch_glu", false),
    ..Family::new(
        "gemma4_text",
        "Gemma4ForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::AllBut {
                every: 6,
                last_is_full: true,
            },
        },
    )
};

/// Reads the fields of a GGUF file: sizes for each kind of layer, shared keys, per-layer inputs,
/// experts.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let pattern = keys.key("attention.sliding_window_pattern");
    if keys.metadata.get(&pattern).is_none() {
        return Err(keys.metadata.missing(&pattern));
    }
    let kinds = header.layer_types()?;
    let slides = |layer: usize| kinds.get(layer) == Some(&"sliding_attention");
    let tensors = header.file.tensors();
    let layers = 0..header.layers;

    let head_dim = keys.uint("attention.key_length_swa", 2, limits::HEAD_DIM)?;
    let head_dim = head_dim.unwrap_or(header.head_dim);
    let values = keys.uint("attention.value_length_swa", 2, limits::HEAD_DIM)?;
    if let Some(values) = values.filter(|n| *n != head_dim) {
        let message =
            format!("is {values} and key_length_swa is {head_dim}; only equal ones are supported");
        return Err(keys.unsupported("attention.value_length_swa", message));
    }
    let heads = header.by_layer("attention.head_count_kv", (1, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let heads_of = |kind| header.of_kind("attention.head_count_kv", &heads, &kinds, kind);
    let (sliding_heads, full_heads) = (heads_of("sliding_attention")?, heads_of("full_attention")?);

    let shared = keys.uint("attention.shared_kv_layers", 0, header.layers)?;
    let shared = shared.unwrap_or(0);
    let with_keys = match shared < header.layers {
        true => header.layers - shared,
        false => header.layers,
    };
    let widths = header.by_layer("feed_forward_length", (1, limits::INTERMEDIATE))?;
    let widths = widths.ok_or_else(|| keys.metadata.missing(&keys.key("feed_forward_length")))?;
    let width = widths.first().copied().unwrap_or_default();
    let double = widths.last() == Some(&(2 * width)) && with_keys < header.layers;
    let expected = |layer: usize| match double && layer >= with_keys {
        true => 2 * width,
        false => width,
    };
    if let Some((layer, actual)) = (layers.clone().zip(&widths)).find(|(i, n)| **n != expected(*i))
    {
        let message = format!("is {actual} in layer {layer}; only layers that share keys differ");
        return Err(keys.unsupported("feed_forward_length", message));
    }
    // In large models, full layers use their keys as values, too.
    let mut without = (0..with_keys).filter(|i| !slides(*i));
    let has_values = |i: usize| tensors.contains_key(&format!("blk.{i}.attn_v.weight"));
    let values_are_keys = without.next().is_some_and(|first| !has_values(first));
    if let Some(layer) = without.find(|i| has_values(*i) == values_are_keys) {
        let message = format!("layer {layer} differs from other full layers in blk.N.attn_v");
        return Err(invalid(header.file.path(), message));
    }

    let inputs = keys.uint("embedding_length_per_layer_input", 0, limits::HIDDEN)?;
    let table = tensors.get("per_layer_token_embd.weight");
    let rotated = keys.uint("rope.dimension_count_swa", 1, head_dim)?;
    let experts = header.experts()?;
    let mut fields = Map::new();
    add(
        &mut fields,
        json!({
            "layer_types": kinds,
            "sliding_window": header.window()?,
            "head_dim": head_dim,
            "global_head_dim": header.head_dim,
            "num_key_value_heads": sliding_heads.or(full_heads),
            "num_global_key_value_heads": full_heads.filter(|_| values_are_keys),
            "attention_k_eq_v": values_are_keys,
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": double,
            "hidden_size_per_layer_input": inputs.unwrap_or(0),
            "vocab_size_per_layer_input": table.and_then(|t| t.shape.first()),
            "final_logit_softcapping": keys.positive("final_logit_softcapping")?,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": keys.positive("rope.freq_base")?.unwrap_or(1e6),
                    "partial_rotary_factor": turning(header)?,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": keys.positive("rope.freq_base_swa")?.unwrap_or(LOCAL_BASE),
                    "partial_rotary_factor":
                        rotated.map_or(1.0, |n| n as f64 / head_dim as f64),
                },
            },
            "enable_moe_block": experts.is_some(),
        }),
    );
    if let Some(experts) = experts {
        add(
            &mut fields,
            json!({
                "num_experts": experts,
                "top_k_experts": keys.required("expert_used_count", limits::EXPERTS)?,
                "moe_intermediate_size":
                    keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?,
            }),
        );
    }
    Ok(Value::Object(fields))
}

/// The fraction of a full layer's heads that rotates, counted from the start. GGUF files express it
/// by factors of wavelengths, which are huge for elements that do not rotate.
fn turning(header: &GgufHeader<'_>) -> Result<f64> {
    let file = header.file;
    let Some(tensor) = file.tensors().get(FACTORS) else {
        return Ok(1.0);
    };
    let bad = |message: &str| invalid(file.path(), format!("{FACTORS} {message}"));
    if tensor.shape != [header.head_dim / 2] {
        return Err(bad("has no factor for each pair of a full layer's head"));
    }
    let factors = dequantize(tensor.kind, &file.read(tensor)?)
        .ok_or_else(|| bad("is of a type that is not supported"))?;
    let turning = factors.iter().take_while(|f| **f == 1.0).count();
    if turning == 0 || factors[turning..].iter().any(|f| *f < STILL || f.is_nan()) {
        return Err(bad(
            "must hold 1 for the first pairs and infinity for the others",
        ));
    }
    Ok(turning as f64 / factors.len() as f64)
}
