//! MiMo-V2-Flash (Xiaomi 2026; reference: `modeling_mimo_v2_flash` of Hugging Face transformers).
//! Sliding layers have attention sinks and more key heads than full layers. Value heads are
//! narrower than key heads. The first layers are dense; the others have experts.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, int, invalid};
use super::moe::{USUAL_PARTS, routed_block};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::loader::Weights;
use crate::nn::uneven_attention::UnevenAttention;
use crate::nn::{Attention, HeadNorms};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    check(config)?;
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let mixer = attention(b, i, &format!("{prefix}.self_attn"))?;
        let mlp = routed_block(b, i, prefix, USUAL_PARTS)?;
        b.pre_norm_block(prefix, mixer, mlp)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(Some(false))?,
    }))
}

/// Returns an error if query heads in sliding layers differ in number or size from those in full
/// layers.
fn check(config: &ModelConfig) -> Result<()> {
    let full = [
        config.num_attention_heads,
        config.head_size(),
        config.required_uint("v_head_dim", 1..=limits::HEAD_DIM)?,
    ];
    let fields = ["swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim"];
    for (field, full) in fields.into_iter().zip(full) {
        let sliding = config.uint(field, 1..=limits::HEADS.max(limits::HEAD_DIM))?;
        if let Some(sliding) = sliding.filter(|sliding| *sliding != full) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{field} is {sliding}; only the value of full layers, {full}, is supported"
                ),
            ));
        }
    }
    Ok(())
}

fn attention(b: &mut Builder<'_>, i: usize, at: &str) -> Result<UnevenAttention> {
    let config = b.config;
    let slides = config.slides(i);
    let (heads, dim, hidden) = (b.dims.n_heads, b.dims.head_dim, b.dims.hidden);
    let name = "swa_num_key_value_heads";
    let groups = match slides {
        true => int(name, config.required_uint(name, 1..=limits::HEADS)?)?,
        false => b.dims.n_kv_heads,
    };
    if heads % groups != 0 {
        return Err(invalid(format!(
            "{name} is {groups}; it must divide num_attention_heads, which is {heads}"
        )));
    }
    let values = config.required_uint("v_head_dim", 1..=limits::HEAD_DIM)?;
    let values = int("v_head_dim", values)?;
    if values > dim {
        return Err(invalid(format!(
            "v_head_dim is {values}; it must be at most head_dim, which is {dim}"
        )));
    }
    let bias = config.attention_bias;
    let name = |part: &str| format!("{at}.{part}");
    let sinks = match b.weights.contains(&name("sinks")) {
        true => Some(b.weights.vector(&name("sinks"), heads)?),
        false => None,
    };
    let scale = b.factor("attention_value_scale")?;
    Ok(UnevenAttention {
        attention: Attention {
            q_proj: b.linear(&name("q_proj"), hidden, heads * dim, bias)?,
            k_proj: Some(b.linear(&name("k_proj"), hidden, groups * dim, bias)?),
            v_proj: Some(b.linear(&name("v_proj"), hidden, groups * values, bias)?),
            o_proj: b.linear(&name("o_proj"), heads * values, hidden, false)?,
            norms: HeadNorms::default(),
            rope: Some(b.rope(i, dim, false)?),
            n_heads: heads,
            n_kv_heads: groups,
            head_dim: dim,
            scale: (dim as f32).powf(-0.5),
            window: b.window(i)?,
            softcap: None,
            growth: None,
            clip: None,
            chunk: None,
            sinks,
            sums: b.weights.attention_sums(),
        },
        values,
        scale,
    })
}
