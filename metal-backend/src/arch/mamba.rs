//! Mamba (Gu and Dao 2023, arXiv:2312.00752; reference: `modeling_mamba` of Hugging Face
//! transformers): each block is one recurrent layer, without a feed-forward part.

use inference::Result;
use mlx_rs_core::{Array, Dtype};

use super::Decoder;
use super::build::{Builder, MAX_CONV, int};
use super::stack::Stack;
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::{Mamba, MambaShape, Norm};

/// The prefix of blocks in a checkpoint.
pub const BLOCKS: &str = "backbone.layers.";

/// The configuration's field names for the sizes.
const FIELDS: Fields = Fields {
    state: "state_size",
    rank: "time_step_rank",
    width: "conv_kernel",
};

/// The configuration's field names for the sizes of a family's layer.
pub(super) struct Fields {
    pub state: &'static str,
    pub rank: &'static str,
    pub width: &'static str,
}

/// Loads the norms of the low-rank step, of B and of C below a prefix.
pub(super) type MapNorms<'a> =
    &'a dyn Fn(&mut Builder<'_>, &str, MambaShape) -> Result<Option<[Norm; 3]>>;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_with(config, weights, &|_, _, _| Ok(None))
}

/// Builds the decoder. `norms` loads the additional norms of a family.
pub(super) fn load_with(
    config: &ModelConfig,
    weights: &mut Weights,
    norms: MapNorms<'_>,
) -> Result<Box<dyn Decoder>> {
    let shape = shape(config, &FIELDS, config.intermediate_size)?;
    let bias = config.flag("use_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks_at(BLOCKS, |b, _, prefix| {
        let at = format!("{prefix}.mixer");
        let norms = norms(b, &at, shape)?;
        let mixer = mixer(b, &at, shape, (bias, norms))?;
        b.mixer_block(prefix, mixer)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("backbone.embeddings")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("backbone.norm_f")?,
        head: b.head(Some(true))?,
    }))
}

/// Returns the sizes of a layer with `inner` channels.
pub(super) fn shape(config: &ModelConfig, fields: &Fields, inner: usize) -> Result<MambaShape> {
    let size = |name: &str, range| int(name, config.required_uint(name, range)?);
    Ok(MambaShape {
        inner: int("intermediate_size", inner)?,
        state: size(fields.state, 1..=limits::HEAD_DIM)?,
        rank: size(fields.rank, 1..=limits::HIDDEN)?,
        width: size(fields.width, 2..=MAX_CONV)?,
    })
}

/// Builds the layer at a prefix. `norms` are the optional norms. `bias` says whether the input and
/// output projections have biases.
pub(super) fn mixer(
    b: &mut Builder<'_>,
    at: &str,
    shape: MambaShape,
    (bias, norms): (bool, Option<[Norm; 3]>),
) -> Result<Mamba> {
    let name = |part: &str| format!("{at}.{part}");
    let MambaShape {
        inner,
        state,
        rank,
        width,
    } = shape;
    let hidden = b.dims.hidden;
    let wide = |a: Array| a.astype(Dtype::Float32).map_err(engine("weights"));
    let skip = wide(b.weights.vector(&name("D"), inner)?)?;
    let rates = if b.weights.contains(&name("rates")) {
        wide(b.weights.tensor(&name("rates"), &[inner, state])?)?
    } else {
        // Directories store `log(-rate)` instead of the rates.
        wide(b.weights.tensor(&name("A_log"), &[inner, state])?)?
            .exp()
            .and_then(|rates| rates.negative())
            .and_then(|rates| rates.eval().map(|()| rates))
            .map_err(engine("weights"))?
    };
    Ok(Mamba {
        in_proj: b.linear(&name("in_proj"), hidden, 2 * inner, bias)?,
        conv: b.causal_conv(&name("conv1d"), inner, width)?,
        x_proj: b.linear(&name("x_proj"), inner, rank + 2 * state, false)?,
        norms,
        dt_proj: b.linear(&name("dt_proj"), rank, inner, true)?,
        rates,
        skip,
        out_proj: b.linear(&name("out_proj"), inner, hidden, bias)?,
        shape,
        layout: shape.layout(),
    })
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config, &FIELDS, config.intermediate_size)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
