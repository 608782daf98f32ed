//! Phi-3.5-MoE (Microsoft 2024; reference: `modeling_phimoe` of Hugging Face transformers): layer
//! norms, biases, and sequential selection of experts.

use inference::Result;

use super::Decoder;
use super::build::NormKind;
use super::llama::Variant;
use super::moe::{ExpertsAt, counts, experts, load as load_mixture};
use crate::checkpoint::ModelConfig;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::{Activation, FeedForward, Mixture, Router};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let noise = config.number("router_jitter_noise")?.unwrap_or(0.01);
    let variant = Variant {
        qkv_bias: true,
        o_bias: true,
        head_bias: true,
        norms: NormKind::Layer { bias: true },
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, _, prefix| {
        let at = format!("{prefix}.block_sparse_moe");
        let activation = Gate::Plain(b.activation(Activation::Silu)?);
        let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
        let stacks = ExpertsAt {
            stacked: format!("{at}.switch_mlp"),
            single: format!("{at}.experts"),
            parts: ["w1", "w3", "w2"],
        };
        Ok(FeedForward::Mixture(Box::new(Mixture {
            router: Router {
                linear: b.linear(&format!("{at}.gate"), hidden, count, false)?,
                per_token,
                weighing: Weighing::NearBest { noise },
                choice_bias: None,
                groups: None,
                logit_cap: None,
            },
            experts: experts(b, &stacks, count, width, activation)?,
            shared: None,
            scale: None,
            weighs_inputs: false,
        })))
    })
}
