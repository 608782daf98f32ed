//! RWKV-7 (Peng et al. 2025, arXiv:2503.14456; reference: flash-linear-attention's `rwkv7`, in the
//! layout that mlx-lm reads). Every block has time mixing and channel mixing. All blocks use the
//! values of the first block, so this decoder is not a stack of independent blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use inference::{Result, StepPart};
use mlx_rs_core::transforms::checkpoint_tree;
use mlx_rs_core::{Array, Error, ErrorKind};

use super::Decoder;
use super::build::{Builder, NormKind, int, invalid};
use super::stack::Head;
use super::wiring::BlockInfo;
use crate::cache::{CacheOptions, Caches, LayerState, RecurrentState, Row, lengths, passing};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::loader::Weights;
use crate::nn::adapter::{self, Scope};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::rwkv::{ChannelMix, RwkvBlock, RwkvShape, TimeMix};
use crate::nn::{Embedding, HeadNorm, Linear, Norm};

/// A decoder of RWKV-7 blocks.
#[derive(Debug)]
struct Rwkv7 {
    embedding: Embedding,
    blocks: Vec<Arc<RwkvBlock>>,
    norm: Norm,
    head: Head,
}

/// Runs a block without caches, and recomputes it in the backward pass (gradient checkpointing).
fn forward_again(
    block: &Arc<RwkvBlock>,
    x: &Array,
    first: Option<&Array>,
    (lengths, layer): (&[i32], usize),
    scope: &Scope,
) -> mlx_rs_core::Result<(Array, Array)> {
    let fault = |what: &str| Error::new(ErrorKind::Value, "block", what);
    let (block, lengths) = (Arc::clone(block), lengths.to_vec());
    let frozen = Scope {
        params: BTreeMap::new(),
        ..scope.clone()
    };
    let args: Vec<Array> = std::iter::once(x).chain(first).cloned().collect();
    let again = checkpoint_tree(move |params: &BTreeMap<String, Array>, args: &[Array]| {
        let Some((x, first)) = args.split_first() else {
            return Err(fault("an input is expected"));
        };
        let scope = Scope {
            params: params.clone(),
            ..frozen.clone()
        };
        let mut caches = passing::caches(lengths.len(), layer + 1);
        let mut rows = passing::rows(&lengths, &mut caches);
        let unwatched = &mut Watch::nothing();
        let run = || block.forward(x, first.first(), &mut rows, layer, unwatched);
        let (x, first) = adapter::within(Arc::new(scope), run)?;
        Ok(vec![x, first])
    });
    match <[Array; 2]>::try_from(again(&scope.of_block(layer), &args)?) {
        Ok([x, first]) => Ok((x, first)),
        Err(_) => Err(fault("two outputs are expected")),
    }
}

impl Decoder for Rwkv7 {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        let lengths = lengths(rows);
        let mut x = self.embedding.forward(ids)?;
        watch.begin(rows);
        watch.lap(None, StepPart::Embedding, &[&x])?;
        watch.saw_embedding(&x)?;
        let again = adapter::scope().filter(|scope| scope.checkpoint);
        let mut first: Option<Array> = None;
        for (layer, block) in self.blocks.iter().enumerate() {
            let (out, values) = match &again {
                Some(scope) => forward_again(block, &x, first.as_ref(), (&lengths, layer), scope)?,
                None => block.forward(&x, first.as_ref(), rows, layer, watch)?,
            };
            x = out;
            first = Some(values);
            watch.lap(layer, StepPart::Mixer, &[&x])?;
            watch.saw_block(layer, &x)?;
        }
        let x = self.norm.forward(&positions.of(&x, &lengths)?)?;
        watch.lap(None, StepPart::Norm, &[&x])?;
        if watch.wants_hidden() {
            return Ok(x);
        }
        let logits = self.head.forward(&x, &self.embedding)?;
        watch.lap(None, StepPart::Head, &[&logits])?;
        Ok(logits)
    }

    fn unembed(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.head.forward(&self.norm.forward(x)?, &self.embedding)
    }

    fn greatest_logits(&self, x: &Array, k: usize) -> mlx_rs_core::Result<Option<(Array, Array)>> {
        let x = self.norm.forward(x)?;
        self.head.greatest(&x, &self.embedding, k)
    }

    fn token_vectors(&self, ids: &Array) -> mlx_rs_core::Result<Array> {
        self.embedding.forward(ids)
    }

    fn token_scores(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.embedding.as_output(x)
    }

    fn new_caches(&self, _options: &CacheOptions) -> Caches {
        let state = |block: &Arc<RwkvBlock>| -> Box<dyn LayerState> {
            Box::new(RecurrentState::new(&block.layout))
        };
        self.blocks.iter().map(state).collect()
    }
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let shape = shape(config)?;
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let blocks = (0..config.num_hidden_layers)
        .map(|layer| block(&mut b, layer, shape).map(Arc::new))
        .collect::<Result<Vec<_>>>()?;
    Ok(Box::new(Rwkv7 {
        embedding: b.embedding("model.embeddings")?,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(Some(false))?,
    }))
}

/// Returns the sizes of blocks.
fn shape(config: &ModelConfig) -> Result<RwkvShape> {
    let dim = config.required_uint("head_dim", 2..=limits::HEAD_DIM)?;
    let hidden = config.hidden_size;
    if !hidden.is_multiple_of(dim) {
        return Err(invalid(format!(
            "head_dim is {dim}; it must divide hidden_size, which is {hidden}"
        )));
    }
    Ok(RwkvShape {
        heads: int("hidden_size", hidden / dim)?,
        dim: int("head_dim", dim)?,
    })
}

/// Builds the block `layer`.
fn block(b: &mut Builder<'_>, layer: usize, shape: RwkvShape) -> Result<RwkvBlock> {
    let at = format!("model.layers.{layer}");
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let pre_norm = match layer {
        0 => Some(b.hidden_norm(&format!("{at}.pre_norm"))?),
        _ => None,
    };
    let share = vector(b, &format!("{at}.ffn.x_k"), hidden)?;
    Ok(RwkvBlock {
        pre_norm,
        time_norm: b.hidden_norm(&format!("{at}.attn_norm"))?,
        time: time_mix(b, &format!("{at}.attn"), layer, shape)?,
        channel_norm: b.hidden_norm(&format!("{at}.ffn_norm"))?,
        channel: ChannelMix {
            share,
            key: b.linear(&format!("{at}.ffn.key"), hidden, width, false)?,
            value: b.linear(&format!("{at}.ffn.value"), width, hidden, false)?,
        },
        shape,
        layout: shape.layout(),
    })
}

fn time_mix(b: &mut Builder<'_>, at: &str, layer: usize, shape: RwkvShape) -> Result<TimeMix> {
    let hidden = b.dims.hidden;
    let name = |part: &str| format!("{at}.{part}");
    let shares = shares(b, at)?;
    let mut flat = |part: &str| vector(b, &name(part), hidden);
    let (key_scale, key_rate) = (flat("k_k")?, flat("k_a")?);
    // GGUF files store a vector instead of one row for each head.
    let bonus = flat("r_k")?
        .reshape(&[shape.heads, shape.dim])
        .map_err(crate::error::engine("weights"))?;
    let mut square = |part: &str| b.linear(&name(part), hidden, hidden, false);
    let (receptance, key) = (square("r_proj")?, square("k_proj")?);
    let (value, output) = (square("v_proj")?, square("o_proj")?);
    let first_share = match layer {
        0 => {
            // Conversion to GGUF stores these tensors for all blocks, but the first block does not
            // use them.
            for part in ["v0", "v1", "v2"] {
                b.weights.ignore(&format!("blk.0.time_mix_{part}"));
            }
            None
        }
        _ => Some(low_rank(b, &name("v_lora"), true)?),
    };
    // In the reference, the epsilon of this norm is the configured epsilon times the head size.
    let eps = b.dims.eps * shape.dim as f32;
    let mut norm = b.group_norm(&name("g_norm"), hidden)?;
    norm = HeadNorm {
        bias: Some(b.flat_vector(&name("g_norm.bias"), hidden)?),
        eps,
        centered: true,
        ..norm
    };
    Ok(TimeMix {
        shares,
        key_scale,
        key_rate,
        bonus,
        receptance,
        key,
        value,
        output,
        decay: low_rank(b, &name("w_lora"), true)?,
        first_share,
        rate: low_rank(b, &name("a_lora"), true)?,
        gate: low_rank(b, &name("g_lora"), false)?,
        norm,
    })
}

/// Returns the fractions of the previous position in the inputs of receptance, decay, keys, values,
/// rates and gates.
fn shares(b: &mut Builder<'_>, at: &str) -> Result<[Array; 6]> {
    const PARTS: [&str; 6] = ["x_r", "x_w", "x_k", "x_v", "x_a", "x_g"];
    let hidden = b.dims.hidden;
    // GGUF files combine all six in one tensor.
    let joined = format!("{at}.x_all");
    if !b.weights.contains(&joined) {
        let each = PARTS.map(|part| vector(b, &format!("{at}.{part}"), hidden));
        let all = each.into_iter().collect::<Result<Vec<_>>>()?;
        return <[Array; 6]>::try_from(all).map_err(|_| invalid("there are six shares"));
    }
    let all = b.weights.tensor(&joined, &[6, 1, 1, hidden])?;
    let part = |i: i32| {
        let part = all.slice_axis(0, i, i + 1)?;
        part.reshape(&[hidden])?.contiguous()
    };
    let all = (0..6).map(part).collect::<mlx_rs_core::Result<Vec<_>>>();
    let all = all.map_err(crate::error::engine("weights"))?;
    <[Array; 6]>::try_from(all).map_err(|_| invalid("there are six shares"))
}

/// Builds two low-rank matrices. The number of rows of the first is the rank.
fn low_rank(b: &mut Builder<'_>, at: &str, bias: bool) -> Result<[Linear; 2]> {
    let (down, up) = (format!("{at}.lora.0"), format!("{at}.lora.2"));
    let rank = b.weights.rows(&down);
    let rank = rank.ok_or_else(|| invalid(format!("the tensor `{down}.weight` is missing")))?;
    let (rank, hidden) = (int("rank", rank)?, b.dims.hidden);
    Ok([
        b.linear(&down, hidden, rank, false)?,
        b.linear(&up, rank, hidden, bias)?,
    ])
}

/// Loads a vector of `len` elements. The tensor may have additional axes of length 1.
fn vector(b: &mut Builder<'_>, name: &str, len: i32) -> Result<Array> {
    match b.weights.shape(name) {
        Some([1, 1, _]) => {
            let all = b.weights.tensor(name, &[1, 1, len])?;
            all.reshape(&[len]).map_err(crate::error::engine("weights"))
        }
        _ => b.flat_vector(name, len),
    }
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    Ok(super::state_bytes::of_recurrent_layers(
        config,
        &shape(config)?.layout(),
    ))
}
