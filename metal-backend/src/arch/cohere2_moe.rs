//! Cohere's mixtures of experts (reference: `modeling_cohere2_moe` of Hugging Face transformers):
//! the blocks of `cohere2`. In most blocks, the feed-forward part is a mixture of experts.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::moe::{ExpertsAt, USUAL_PARTS, counts, dense_layers, experts};
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::moe::SharedExpert;
use crate::nn::{Activation, FeedForward, Mixture, Router};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let norms = match text(config, "norm_type") {
        Some("rms") => NormKind::Rms,
        _ => NormKind::Layer { bias: false },
    };
    let dense = dense_layers(config)?;
    let pattern = config.uint("prefix_dense_sliding_window_pattern", 1..=limits::LAYERS)?;
    let dense_rotates = pattern.unwrap_or(1) == 1;
    let mut b = Builder::new(config, weights)?.with_norms(norms);
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            traditional: true,
            no_rope: !(b.config.slides(i) || dense[i] && dense_rotates),
            ..AttentionParts::default()
        };
        let at = format!("{prefix}.mlp");
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&format!("{prefix}.input_layernorm"))?),
            mixer: b.attention(i, &format!("{prefix}.self_attn"), parts)?,
            mixer_out: None,
            mlp_in: None,
            mlp: match dense[i] {
                true => {
                    let width = "prefix_dense_intermediate_size";
                    let width = config.required_uint(width, 1..=limits::INTERMEDIATE)?;
                    let activation = b.activation(Activation::Silu)?;
                    let width = b.part_of("prefix_dense_intermediate_size", width)?;
                    FeedForward::Gated(b.gated_mlp(&at, width, activation, false)?)
                }
                false => FeedForward::Mixture(Box::new(mixture(b, &at)?)),
            },
            mlp_out: None,
            residual: None,
            parallel: true,
        })
    })?;
    let mut head = b.head(Some(true))?;
    head.scale = b.factor("logit_scale")?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}

/// Returns a string from the configuration.
fn text<'a>(config: &'a ModelConfig, name: &str) -> Option<&'a str> {
    config.fields.get(name).and_then(|value| value.as_str())
}

/// Builds the mixture at `at`. Its router selects experts by raw scores.
fn mixture(b: &mut Builder<'_>, at: &str) -> Result<Mixture> {
    let config = b.config;
    let unknown = |name: &str, known: &str| {
        Error::new(
            ErrorKind::Unsupported,
            format!("{name} is unknown; supported are {known}"),
        )
    };
    let weighing = match text(config, "expert_selection_fn") {
        None | Some("softmax") => Weighing::SoftmaxOfChosen,
        Some("sigmoid") => Weighing::Sigmoid {
            normalized: config.flag("norm_topk_prob")?.unwrap_or(true),
            scale: 1.0,
            eps: 0.0,
        },
        Some(_) => return Err(unknown("expert_selection_fn", "sigmoid, softmax")),
    };
    let activation = b.activation(Activation::Silu)?;
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let width = b.dims.intermediate;
    let shared = config.uint("num_shared_experts", 0..=limits::EXPERTS)?;
    let shared = match shared.unwrap_or(0) {
        0 => None,
        n => {
            let width = b.part_of(
                "num_shared_experts",
                n.saturating_mul(config.intermediate_size),
            )?;
            let mlp = b.gated_mlp(&format!("{at}.shared_experts"), width, activation, false)?;
            Some((SharedExpert::Gated(mlp), None))
        }
    };
    let scale = match text(config, "shared_expert_combination_strategy") {
        _ if shared.is_none() => None,
        None | Some("average") => Some(b.scalar(0.5)?),
        Some("sum") => None,
        Some(_) => {
            let field = "shared_expert_combination_strategy";
            return Err(unknown(field, "average, sum"));
        }
    };
    let places = ExpertsAt {
        stacked: format!("{at}.switch_mlp"),
        single: format!("{at}.experts"),
        parts: USUAL_PARTS,
    };
    Ok(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.gate"), b.dims.hidden, count, false)?,
            per_token,
            weighing,
            choice_bias: None,
            groups: None,
            logit_cap: None,
        },
        experts: experts(b, &places, count, width, Gate::Plain(activation))?,
        shared,
        scale,
        weighs_inputs: false,
    })
}
