//! LFM2 with mixtures of experts (Liquid AI 2025; reference: `modeling_lfm2_moe` of Hugging Face
//! transformers). Scores are sigmoids, and a bias affects only the selection. The first layers are
//! dense.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::lfm2::{feed_forward, load_with};
use super::moe::{ExpertsAt, counts, experts};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::{Activation, FeedForward, Mixture, Router};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let dense = config.required_uint("num_dense_layers", 0..=limits::LAYERS)?;
    load_with(config, weights, &|b, i, at| {
        if i < dense {
            let width = b.dims.intermediate;
            return feed_forward(b, at, width);
        }
        mixture(b, at)
    })
}

fn mixture(b: &mut Builder<'_>, at: &str) -> Result<FeedForward> {
    let config = b.config;
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let width = config.required_uint("moe_intermediate_size", 1..=limits::INTERMEDIATE)?;
    let has_bias = config.flag("use_expert_bias")?.unwrap_or(true);
    let choice_bias = if has_bias {
        let name = format!("{at}.expert_bias");
        Some(b.weights.vector(&name, count)?)
    } else {
        None
    };
    let router = Router {
        linear: b.linear(&format!("{at}.gate"), b.dims.hidden, count, false)?,
        per_token,
        weighing: Weighing::Sigmoid {
            normalized: config.flag("norm_topk_prob")?.unwrap_or(true),
            scale: config.number("routed_scaling_factor")?.unwrap_or(1.0),
            eps: 1e-6,
        },
        choice_bias,
        groups: None,
        logit_cap: None,
    };
    let places = ExpertsAt {
        stacked: format!("{at}.switch_mlp"),
        single: format!("{at}.experts"),
        parts: ["w1", "w3", "w2"],
    };
    let width = b.part_of("moe_intermediate_size", width)?;
    let gate = Gate::Plain(Activation::Silu);
    Ok(FeedForward::Mixture(Box::new(Mixture {
        router,
        experts: experts(b, &places, count, width, gate)?,
        shared: None,
        scale: None,
        weighs_inputs: false,
    })))
}
