//! gpt-oss.

use serde_json::{Map, Value, json};

use super::gguf::add;
use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, fill};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete: |map| fill(map, json!({"head_dim": 64, "sliding_window": 128})),
    reply: Some("harmony"),
    gguf: Some(GgufFamily {
        optional_biases: true,
        read,
        write,
        overrides: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_sinks", "self_attn.sinks"),
            ("ffn_gate_inp", "mlp.router"),
            ("ffn_gate_exps", "mlp.experts.gate_proj"),
            ("ffn_up_exps", "mlp.experts.up_proj"),
            ("ffn_down_exps", "mlp.experts.down_proj"),
        ],
        ..GgufFamily::new("gpt-oss")
    }),
    tensor_parallel: super::TensorParallel::Alternating,
    joined_experts: super::JoinedExperts::stacks(".experts", true),
    ..Family::new(
        "gpt_oss",
        "GptOssForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 150_000.0,
            windows: Windows::AllBut {
                every: 2,
                last_is_full: false,
            },
        },
    )
};

/// Reads the fields of a GGUF file. It also disables the rounding of YaRN's transition, as in the
/// reference. The metadata cannot express that.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let mut fields = Map::new();
    add(
        &mut fields,
        json!({
            "num_local_experts": header.experts()?,
            "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
            "intermediate_size":
                keys.required("expert_feed_forward_length", limits::INTERMEDIATE)?,
            "sliding_window": header.window()?,
        }),
    );
    if keys.metadata.str(&keys.key("rope.scaling.type"))? == Some("yarn") {
        add(
            &mut fields,
            json!({"rope_scaling": {
                "rope_type": "yarn",
                "factor": keys.positive("rope.scaling.factor")?,
                "original_max_position_embeddings":
                    keys.uint("rope.scaling.original_context_length", 1, limits::POSITIONS)?,
                "beta_fast": keys.positive("rope.scaling.yarn_beta_fast")?,
                "beta_slow": keys.positive("rope.scaling.yarn_beta_slow")?,
                "truncate": false,
            }}),
        );
    }
    Ok(Value::Object(fields))
}

/// Lists the kinds of layers, because transformers cannot derive them.
fn write(config: &mut Map<String, Value>) {
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    let kinds: Vec<_> = (0..layers.unwrap_or(0))
        .map(|layer| match layer % 2 {
            0 => "sliding_attention",
            _ => "full_attention",
        })
        .collect();
    add(config, json!({"layer_types": kinds}));
}
