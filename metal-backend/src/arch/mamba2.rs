//! Mamba-2 (Dao and Gu 2024, arXiv:2405.21060; reference: `modeling_mamba2` of Hugging Face
//! transformers): each block is one recurrent layer, without a feed-forward part.

use inference::Result;
use mlx_rs_core::{Array, Dtype};
use serde_json::Value;

use super::Decoder;
use super::build::{Builder, MAX_CONV, int, invalid};
use super::stack::Stack;
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::mamba2::GatedNorm;
use crate::nn::{Mamba2, Mamba2Shape};

/// The prefix of blocks in a checkpoint.
pub const BLOCKS: &str = "backbone.layers.";

/// The configuration's field names for the sizes.
const FIELDS: Fields = Fields {
    heads: "num_heads",
    dim: "head_dim",
    state: "ssm_state_size",
    groups: "n_groups",
    width: "conv_kernel",
};

/// The configuration's field names for the sizes of a family's layer.
pub(super) struct Fields {
    pub heads: &'static str,
    pub dim: &'static str,
    pub state: &'static str,
    pub groups: &'static str,
    pub width: &'static str,
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let shape = shape(config, &FIELDS)?;
    let bias = config.flag("use_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks_at(BLOCKS, |b, _, prefix| {
        let at = format!("{prefix}.mixer");
        let norm = grouped_norm(b, &at, shape)?;
        let mixer = mixer(b, &at, shape, ([bias; 2], norm))?;
        b.mixer_block(prefix, mixer)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("backbone.embeddings")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("backbone.norm_f")?,
        head: b.head(Some(false))?,
    }))
}

/// Returns the sizes of a layer.
pub(super) fn shape(config: &ModelConfig, fields: &Fields) -> Result<Mamba2Shape> {
    let size = |name: &str, most: usize| int(name, config.required_uint(name, 1..=most)?);
    let width = config.required_uint(fields.width, 2..=MAX_CONV)?;
    let shape = Mamba2Shape {
        heads: size(fields.heads, limits::HEADS)?,
        dim: size(fields.dim, limits::HEAD_DIM)?,
        state: size(fields.state, limits::HEAD_DIM)?,
        groups: size(fields.groups, limits::HEADS)?,
        width: int(fields.width, width)?,
        step_limit: step_limit(config)?,
    };
    if shape.heads % shape.groups != 0 {
        return Err(invalid(format!(
            "{} is {}; it must divide {}, which is {}",
            fields.groups, shape.groups, fields.heads, shape.heads
        )));
    }
    Ok(shape)
}

/// Returns the minimum and maximum step size. The maximum is infinite if it is null or exceeds
/// float32, because Python writes `Infinity` for a missing bound.
fn step_limit(config: &ModelConfig) -> Result<(f32, f32)> {
    let fault = || invalid("time_step_limit must be two numbers, the first not above the second");
    let limit = match config.fields.get("time_step_limit") {
        None | Some(Value::Null) => (0.0, f64::INFINITY),
        Some(Value::Array(both)) => match both.as_slice() {
            [least, Value::Null] => (least.as_f64().ok_or_else(fault)?, f64::INFINITY),
            [least, most] => (
                least.as_f64().ok_or_else(fault)?,
                most.as_f64().ok_or_else(fault)?,
            ),
            _ => return Err(fault()),
        },
        Some(_) => return Err(fault()),
    };
    if limit.0 < 0.0 || limit.0 > limit.1 {
        return Err(fault());
    }
    Ok((limit.0 as f32, limit.1 as f32))
}

/// Builds a norm after the gate. As in mamba_ssm, each group of heads is normalized separately.
pub(super) fn grouped_norm(b: &mut Builder<'_>, at: &str, shape: Mamba2Shape) -> Result<GatedNorm> {
    Ok(GatedNorm::Grouped {
        norm: b.group_norm(&format!("{at}.norm"), shape.inner())?,
        groups: shape.groups,
        before_gate: false,
    })
}

/// Builds the layer at a prefix with the norm `norm`. `bias_in` and `bias_out` say whether the
/// input and output projections have biases.
pub(super) fn mixer(
    b: &mut Builder<'_>,
    at: &str,
    shape: Mamba2Shape,
    ([bias_in, bias_out], norm): ([bool; 2], GatedNorm),
) -> Result<Mamba2> {
    let name = |part: &str| format!("{at}.{part}");
    let hidden = b.dims.hidden;
    let mut each = |part: &str| -> Result<Array> {
        let stored = b.flat_vector(&name(part), shape.heads)?;
        stored.astype(Dtype::Float32).map_err(engine("weights"))
    };
    let (dt_bias, skip) = (each("dt_bias")?, each("D")?);
    let rates = rates(b, at, shape.heads)?;
    let width = shape.inner() + shape.channels() + shape.heads;
    Ok(Mamba2 {
        in_proj: b.linear(&name("in_proj"), hidden, width, bias_in)?,
        conv: b.causal_conv(&name("conv1d"), shape.channels(), shape.width)?,
        rates,
        dt_bias,
        skip,
        factors: None,
        norm,
        out_proj: b.linear(&name("out_proj"), shape.inner(), hidden, bias_out)?,
        shape,
        layout: shape.layout(),
    })
}

/// Returns the negative decay rates, `[heads]` in float32. GGUF files store these rates. Other
/// checkpoints store the logarithms of their absolute values.
pub(super) fn rates(b: &mut Builder<'_>, at: &str, heads: i32) -> Result<Array> {
    let stored = format!("{at}.rates");
    let wide = |a: Array| a.astype(Dtype::Float32).map_err(engine("weights"));
    if b.weights.contains(&stored) {
        return wide(b.flat_vector(&stored, heads)?);
    }
    wide(b.weights.vector(&format!("{at}.A_log"), heads)?)?
        .exp()
        .and_then(|rates| rates.negative())
        .and_then(|rates| rates.eval().map(|()| rates))
        .map_err(engine("weights"))
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config, &FIELDS)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
