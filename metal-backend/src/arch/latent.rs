//! Functions for families with latent attention. They build the attention layer with the usual
//! tensor names, and DeepSeek's decoder (reference: `modeling_deepseek_v2`, `modeling_deepseek_v3`
//! of Hugging Face transformers).

use inference::Result;
use mlx_rs_core::Array;

use super::build::{Builder, NormKind, int, invalid};
use super::moe::{USUAL_PARTS, routed_block};
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::{RopeConfig, limits};
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::attention::Growth;
use crate::nn::head_matrices::HeadMatrices;
use crate::nn::indexer::Indexer;
use crate::nn::latent_attention::{LatentAttention, LatentQueries, ShortQueries};
use crate::nn::{Attention, FeedForward, HeadNorms, Linear, Norm, Rope};

/// The differences between families with latent attention.
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    /// The rotary embedding pairs adjacent elements, instead of elements from the two halves of a
    /// head.
    pub traditional: bool,
    /// Epsilon of the low-rank norms; `None` if it equals that of the other norms.
    pub eps: Option<f32>,
    /// Factor on the attention and feed-forward outputs before the residual sum.
    pub residual: Option<f32>,
    /// Queries and keys do not rotate (Kimi Linear).
    pub unrotated: bool,
    /// Growth of queries with their position (Mistral 4).
    pub growth: Option<Growth>,
}

impl Latent {
    /// The settings of `DeepSeek` V2 and V3.
    pub const DEEPSEEK: Self = Self {
        traditional: true,
        eps: Some(1e-6),
        residual: None,
        unrotated: false,
        growth: None,
    };
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    query_rank: Option<i32>,
    rank: i32,
    plain: i32,
    rotated: i32,
    values: i32,
}

impl Sizes {
    fn from_config(config: &ModelConfig) -> Result<Self> {
        let size = |name: &str, range| int(name, config.required_uint(name, range)?);
        let query_rank = config.uint("q_lora_rank", 1..=limits::HIDDEN)?;
        let head = || 1..=limits::HEAD_DIM;
        Ok(Self {
            query_rank: query_rank.map(|n| int("q_lora_rank", n)).transpose()?,
            rank: size("kv_lora_rank", head())?,
            plain: size("qk_nope_head_dim", head())?,
            rotated: size("qk_rope_head_dim", 2..=limits::HEAD_DIM)?,
            values: size("v_head_dim", head())?,
        })
    }
}

/// Returns the number of cached elements per token in all layers; `None` for families without
/// latent attention.
pub fn key_numbers(config: &ModelConfig) -> Result<Option<u64>> {
    if !config.family().is_some_and(|family| family.latent) {
        return Ok(None);
    }
    let sizes = Sizes::from_config(config)?;
    let marks = config.uint("index_head_dim", 1..=limits::HEAD_DIM)?;
    let width = u64::from((sizes.rank + sizes.rotated).unsigned_abs());
    let width = width + marks.unwrap_or(0) as u64;
    let layers = 0..config.num_hidden_layers;
    let layers = layers.filter(|&layer| config.has_keys(layer)).count();
    Ok(Some(width * 2 * layers as u64))
}

/// Builds the attention of layer `i` at the prefix `at`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn attention(
    b: &mut Builder<'_>,
    i: usize,
    at: &str,
    latent: Latent,
) -> Result<LatentAttention> {
    let sizes = Sizes::from_config(b.config)?;
    let Sizes {
        rank,
        plain,
        rotated,
        values,
        ..
    } = sizes;
    let (hidden, heads, bias) = (b.dims.hidden, b.dims.n_heads, b.config.attention_bias);
    let name = |part: &str| format!("{at}.{part}");
    let width = heads * (plain + rotated);
    let queries = match sizes.query_rank {
        None => LatentQueries::Direct(b.linear(&name("q_proj"), hidden, width, false)?),
        Some(rank) => LatentQueries::Latent(Box::new(ShortQueries {
            down: b.linear(&name("q_a_proj"), hidden, rank, bias)?,
            norm: short_norm(b, &name("q_a_layernorm"), rank, latent)?,
            up: b.linear(&name("q_b_proj"), rank, width, false)?,
        })),
    };
    let (to_latent, from_latent) = expansions(b, at, sizes)?;
    let on_cpu = b.weights.is_on_cpu();
    let prepared = |matrices| HeadMatrices::new(matrices, on_cpu).map_err(engine("weights"));
    let config = RopeConfig {
        partial: 1.0,
        ..b.config.rope_of(i).clone()
    };
    let rope = match latent.unrotated {
        true => None,
        false => Some(
            Rope::new(rotated, &config, latent.traditional, b.weights.dtype())
                .map_err(engine("rope"))?,
        ),
    };
    let growth = yarn_growth(b.config);
    b.weights.ignore(&name("rotary_emb.inv_freq"));
    Ok(LatentAttention {
        queries,
        kv_down: b.linear(&name("kv_a_proj_with_mqa"), hidden, rank + rotated, bias)?,
        kv_norm: short_norm(b, &name("kv_a_layernorm"), rank, latent)?,
        to_latent: prepared(to_latent)?,
        from_latent: prepared(from_latent)?,
        plain,
        rotated,
        values,
        indexer: None,
        core: Attention {
            q_proj: Linear::absent(),
            k_proj: None,
            v_proj: None,
            o_proj: b.linear(&name("o_proj"), heads * values, hidden, bias)?,
            norms: HeadNorms::default(),
            rope,
            n_heads: heads,
            n_kv_heads: 1,
            head_dim: rotated + rank,
            scale: ((plain + rotated) as f32).powf(-0.5) * growth * growth,
            window: None,
            softcap: None,
            growth: latent.growth,
            clip: None,
            chunk: None,
            sinks: None,
            sums: b.weights.attention_sums(),
        },
    })
}

/// Loads the norm of a low-rank vector. Its epsilon may differ from the other norms.
fn short_norm(b: &mut Builder<'_>, prefix: &str, dim: i32, latent: Latent) -> Result<Norm> {
    let usual = b.dims.eps;
    b.dims.eps = latent.eps.unwrap_or(usual);
    let norm = b.norm(prefix, dim);
    b.dims.eps = usual;
    norm
}

/// Returns the matrices `[heads, plain, rank]` and `[heads, rank, values]`. Checkpoints of
/// transformers store both in one matrix; those of mlx-lm store two matrices.
fn expansions(b: &mut Builder<'_>, at: &str, sizes: Sizes) -> Result<(Array, Array)> {
    let Sizes {
        rank,
        plain,
        values,
        ..
    } = sizes;
    let heads = b.dims.n_heads;
    let fault = engine("weights");
    let evaluated = |a: mlx_rs_core::Result<Array>| -> Result<Array> {
        a.and_then(|a| a.contiguous())
            .and_then(|a| a.eval().map(|()| a))
            .map_err(engine("weights"))
    };
    let both = format!("{at}.kv_b_proj");
    if b.weights.contains(&format!("{both}.weight")) {
        let matrix = b.weights.matrix(&both, heads * (plain + values), rank)?;
        let matrix = (b.weights.plain(&matrix)?)
            .reshape(&[heads, plain + values, rank])
            .map_err(fault)?;
        let down = matrix.slice_axis(1, plain, plain + values);
        let down = down.and_then(|m| m.swap_axes(-1, -2));
        return Ok((evaluated(matrix.slice_axis(1, 0, plain))?, evaluated(down)?));
    }
    let mut stack = |part: &str, rows: i32, cols: i32| -> Result<Array> {
        let weight = b
            .weights
            .stack(&format!("{at}.{part}"), &[heads, rows, cols])?;
        let dense = b.weights.plain(&weight)?;
        evaluated(
            dense
                .reshape(&[heads, rows, cols])
                .and_then(|m| m.swap_axes(-1, -2)),
        )
    };
    Ok((
        stack("embed_q", rank, plain)?,
        stack("unembed_out", values, rank)?,
    ))
}

/// Returns the factor on queries and keys that YaRN's `mscale_all_dim` determines; 1 without it.
fn yarn_growth(config: &ModelConfig) -> f32 {
    let objects = ["rope_scaling", "rope_parameters"];
    let scaling = objects
        .iter()
        .find_map(|name| config.fields.get(*name)?.as_object());
    let number = |name: &str| scaling?.get(name)?.as_f64();
    match (number("mscale_all_dim"), number("factor")) {
        (Some(weight), Some(factor)) if weight != 0.0 && factor > 1.0 => {
            (0.1 * weight * factor.ln() + 1.0) as f32
        }
        _ => 1.0,
    }
}

/// Builds the decoder. All of its blocks are dense.
///
/// # Errors
/// The errors of [`routed`].
pub fn dense(
    config: &ModelConfig,
    weights: &mut Weights,
    latent: Latent,
) -> Result<Stack<LatentAttention>> {
    stack(config, weights, latent, &|b, _, prefix| {
        let activation = b.activation(crate::nn::Activation::Silu)?;
        let width = b.dims.intermediate;
        let mlp = b.gated_mlp(
            &format!("{prefix}.mlp"),
            width,
            activation,
            b.config.mlp_bias,
        )?;
        Ok(FeedForward::Gated(mlp))
    })
}

/// Builds the decoder. Its first blocks are dense; the others have mixtures of experts.
///
/// # Errors
/// The errors of [`routed_block`].
pub fn routed(
    config: &ModelConfig,
    weights: &mut Weights,
    latent: Latent,
) -> Result<Stack<LatentAttention>> {
    stack(config, weights, latent, &|b, i, prefix| {
        routed_block(b, i, prefix, USUAL_PARTS)
    })
}

/// Builds the decoder as [`routed`] does, with an indexer in each layer. `traditional` says whether
/// the family's indexers rotate adjacent elements. The configuration can override it.
///
/// # Errors
/// The errors of [`routed`].
pub fn indexed(
    config: &ModelConfig,
    weights: &mut Weights,
    latent: Latent,
    traditional: bool,
) -> Result<Stack<LatentAttention>> {
    let traditional = config
        .flag("indexer_rope_interleave")?
        .unwrap_or(traditional);
    stack_of(
        config,
        weights,
        latent,
        &|b, i, at| {
            let mut mixer = attention(b, i, at, latent)?;
            let indexer = indexer(b, i, &format!("{at}.indexer"), traditional)?;
            mixer.core.head_dim += indexer.dim;
            mixer.indexer = Some(indexer);
            Ok(mixer)
        },
        &|b, i, prefix| routed_block(b, i, prefix, USUAL_PARTS),
    )
}

/// Builds the indexer of layer `i` at the prefix `at`.
fn indexer(b: &mut Builder<'_>, i: usize, at: &str, traditional: bool) -> Result<Indexer> {
    let config = b.config;
    let sizes = Sizes::from_config(config)?;
    let size = |name: &str, most: usize| int(name, config.required_uint(name, 1..=most)?);
    let (heads, dim) = (
        size("index_n_heads", limits::HEADS)?,
        size("index_head_dim", limits::HEAD_DIM)?,
    );
    let count = size("index_topk", limits::POSITIONS)?;
    let rank = sizes
        .query_rank
        .ok_or_else(|| invalid("q_lora_rank is missing; an indexer needs it"))?;
    if dim < sizes.rotated {
        return Err(invalid(format!(
            "index_head_dim is {dim}; it must be at least qk_rope_head_dim, which is {}",
            sizes.rotated
        )));
    }
    let rope = RopeConfig {
        partial: 1.0,
        ..config.rope_of(i).clone()
    };
    let rope = Rope::new(sizes.rotated, &rope, traditional, b.weights.dtype());
    let hidden = b.dims.hidden;
    let name = |part: &str| format!("{at}.{part}");
    let (usual, eps) = (b.norms, b.dims.eps);
    (b.norms, b.dims.eps) = (NormKind::Layer { bias: true }, 1e-6);
    let key_norm = b.norm(&name("k_norm"), dim);
    (b.norms, b.dims.eps) = (usual, eps);
    Ok(Indexer {
        queries: b.linear(&name("wq_b"), rank, heads * dim, false)?,
        keys: b.linear(&name("wk"), hidden, dim, false)?,
        key_norm: key_norm?,
        weights: b.linear(&name("weights_proj"), hidden, heads, false)?,
        rope: rope.map_err(engine("rope"))?,
        heads,
        dim,
        count,
    })
}

fn stack(
    config: &ModelConfig,
    weights: &mut Weights,
    latent: Latent,
    mlp: Part<'_, FeedForward>,
) -> Result<Stack<LatentAttention>> {
    stack_of(
        config,
        weights,
        latent,
        &|b, i, at| attention(b, i, at, latent),
        mlp,
    )
}

/// Builds the mixer or the feed-forward part of a block from the block's index and a prefix.
type Part<'a, P> = &'a dyn Fn(&mut Builder<'_>, usize, &str) -> Result<P>;

fn stack_of(
    config: &ModelConfig,
    weights: &mut Weights,
    latent: Latent,
    mixer: Part<'_, LatentAttention>,
    mlp: Part<'_, FeedForward>,
) -> Result<Stack<LatentAttention>> {
    let mut b = Builder::new(config, weights)?;
    b.ignore_predicting_layers()?;
    let residual = latent.residual.map(|factor| b.scalar(factor)).transpose()?;
    let blocks = b.blocks(|b, i, prefix| {
        let mixer = mixer(b, i, &format!("{prefix}.self_attn"))?;
        let mlp = mlp(b, i, prefix)?;
        Ok(Block {
            residual: residual.clone(),
            ..b.pre_norm_block(prefix, mixer, mlp)?
        })
    })?;
    Ok(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    })
}
