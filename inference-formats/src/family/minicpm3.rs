//! MiniCPM 3.

use serde_json::{Map, Value, json};

use super::{Defaults, Family, GgufFamily, GgufHeader, Windows, deepseek_v3, fill};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    latent: true,
    gguf: Some(GgufFamily {
        is_latent: true,
        read,
        overrides: deepseek_v3::NAMES,
        ..GgufFamily::new("minicpm3")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        Defaults {
            norm_eps: 1e-5,
            rope_theta: 1e6,
            windows: Windows::Never,
        },
    )
};

/// Reads the fields of a GGUF file. The file contains no scale factors of the embedding and the
/// residual stream, so the function returns those of the only published model. The width of a value
/// head is `hidden_size / num_attention_heads`.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let rotated = keys.required("rope.dimension_count", limits::HEAD_DIM)?;
    let keyed = keys.required("attention.key_length", limits::HEAD_DIM)?;
    if keyed <= rotated {
        let message = format!("is {rotated}; it must be less than the width of a key, {keyed}");
        return Err(keys.wrong("rope.dimension_count", message));
    }
    Ok(json!({
        "num_key_value_heads": header.heads,
        "q_lora_rank": keys.required("attention.q_lora_rank", limits::HIDDEN)?,
        "kv_lora_rank": keys.required("attention.kv_lora_rank", limits::HEAD_DIM)?,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keyed - rotated,
        "v_head_dim": header.hidden / header.heads,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }))
}

fn complete(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_u64);
    let heads = number("num_attention_heads").filter(|heads| *heads > 0);
    if let (Some(hidden), Some(heads)) = (number("hidden_size"), heads) {
        fill(map, json!({"v_head_dim": hidden / heads}));
    }
}
