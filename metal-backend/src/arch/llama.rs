//! Llama (Touvron et al. 2023; reference: `modeling_llama` of Hugging Face transformers): pre-norm
//! blocks of grouped-query attention and a gated feed-forward part. Many families use this decoder
//! with other biases, norms, names or factors. A [`Variant`] describes the differences of one
//! family.

use inference::Result;
use mlx_rs_core::Array;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::attention::Growth;
use crate::nn::{Activation, FeedForward};

/// The differences between llama-like families.
#[derive(Debug, Clone, Copy, Default)]
pub struct Variant {
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the feed-forward block.
    pub mlp_bias: bool,
    /// A bias on the output head.
    pub head_bias: bool,
    /// Norms on query and key heads before rotation.
    pub qk_norm: bool,
    /// One norm on all query heads together and one on all key heads, before rotation.
    pub wide_qk_norm: bool,
    /// Norms of query and key heads come after the rotation.
    pub norm_after_rotation: bool,
    /// The formula of norms.
    pub norms: NormKind,
    /// The rotary embedding pairs adjacent elements, instead of elements from the two halves of a
    /// head.
    pub traditional: bool,
    /// The rotary embedding rotates in the opposite direction.
    pub reversed: bool,
    /// No rotary embedding.
    pub no_rope: bool,
    /// One matrix computes queries, keys and values.
    pub fused: bool,
    /// The fused matrix combines query, key and value heads in groups, one for each key head.
    pub grouped: bool,
    /// The kind of feed-forward block.
    pub mlp: MlpKind,
    /// The norms of blocks in which attention and feed-forward read the same input, so that their
    /// outputs are summed. `None` if the feed-forward part reads the output of attention.
    pub parallel: Option<Parallel>,
    /// Factor on the scores, instead of `1 / sqrt(head_dim)`.
    pub score_scale: Option<f32>,
    /// Queries, keys and values are clamped to `-clip..clip`.
    pub clip: Option<f32>,
    /// Growth of queries with their position.
    pub growth: Option<Growth>,
    /// Factor on the attention and feed-forward outputs before the residual sum.
    pub residual: Option<f32>,
}

/// The matrices of a feed-forward block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MlpKind {
    /// Three matrices: gate, up and down.
    #[default]
    Gated,
    /// Two matrices. The first combines gate and up; the second is down.
    Fused,
    /// Two matrices: up and down.
    Plain,
}

/// The norms of blocks in which attention and feed-forward read the same input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parallel {
    /// One norm for both attention and feed-forward.
    OneNorm,
    /// Separate norms for attention and feed-forward.
    TwoNorms,
}

impl Variant {
    /// Returns the variant with the biases that `attention_bias` and `mlp_bias` of the
    /// configuration select.
    pub fn configured(config: &ModelConfig) -> Self {
        Self {
            qkv_bias: config.attention_bias,
            o_bias: config.attention_bias,
            mlp_bias: config.mlp_bias,
            ..Self::default()
        }
    }
}

/// Loads a llama checkpoint.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_variant(config, weights, Variant::configured(config))
}

/// Builds the llama decoder of this variant from a checkpoint.
pub(super) fn load_variant(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
) -> Result<Box<dyn Decoder>> {
    Ok(Box::new(variant_stack(config, weights, variant)?))
}

/// Builds the llama decoder of this variant.
pub(super) fn variant_stack(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
) -> Result<Stack> {
    let default = match variant.mlp {
        MlpKind::Gated | MlpKind::Fused => Activation::Silu,
        MlpKind::Plain => Activation::GeluTanh,
    };
    stack_of(config, weights, variant, &|b, _, prefix| {
        let at = format!("{prefix}.mlp");
        let activation = b.activation(default)?;
        let (width, bias) = (b.dims.intermediate, variant.mlp_bias);
        match variant.mlp {
            MlpKind::Gated => {
                let mlp = b.gated_mlp(&at, width, activation, bias)?;
                Ok(FeedForward::Gated(mlp))
            }
            MlpKind::Fused => b.fused_mlp(&at, activation),
            MlpKind::Plain => b.plain_mlp(&at, activation, bias),
        }
    })
}

/// Builds the decoder of this variant. `mlp` builds the feed-forward parts.
pub(super) fn stack_of(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
    mlp: &dyn Fn(&mut Builder<'_>, usize, &str) -> Result<FeedForward>,
) -> Result<Stack> {
    let mut b = Builder::new(config, weights)?.with_norms(variant.norms);
    let residual = variant
        .residual
        .map(|factor| b.scalar(factor))
        .transpose()?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let mut attention = b.attention(i, &at, parts(variant))?;
        if variant.qk_norm {
            attention.norms = b.head_norms(&at)?;
            attention.norms.after_rotation = variant.norm_after_rotation;
        } else if variant.wide_qk_norm {
            attention.norms = b.wide_head_norms(&at)?;
        }
        if let Some(scale) = variant.score_scale {
            attention.scale = scale;
        }
        attention.growth = variant.growth;
        attention.clip = variant.clip;
        if variant.reversed {
            let reversed = attention
                .rope
                .map(|rope| rope.reversed().map_err(engine("rope")));
            attention.rope = reversed.transpose()?;
        }
        let mlp = mlp(b, i, prefix)?;
        block(b, variant, residual.as_ref(), (prefix, attention, mlp))
    })?;
    Ok(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head_with(None, variant.head_bias)?,
    })
}

/// Builds a block of this variant.
fn block(
    b: &mut Builder<'_>,
    variant: Variant,
    residual: Option<&Array>,
    (prefix, mixer, mlp): (&str, crate::nn::Attention, FeedForward),
) -> Result<Block> {
    let two = variant.parallel != Some(Parallel::OneNorm);
    let mlp_in = match two {
        true => Some(b.hidden_norm(&format!("{prefix}.post_attention_layernorm"))?),
        false => None,
    };
    Ok(Block {
        mixer_in: Some(b.hidden_norm(&format!("{prefix}.input_layernorm"))?),
        mixer,
        mixer_out: None,
        mlp_in,
        mlp,
        mlp_out: None,
        residual: residual.cloned(),
        parallel: variant.parallel.is_some(),
    })
}

/// Returns the variations of the attention layer for this variant.
pub(super) fn parts(variant: Variant) -> AttentionParts {
    AttentionParts {
        qkv_bias: variant.qkv_bias,
        o_bias: variant.o_bias,
        traditional: variant.traditional,
        fused: variant.fused,
        grouped: variant.grouped,
        no_rope: variant.no_rope,
        ..AttentionParts::default()
    }
}
