//! Mixtral (Jiang et al. 2024; reference: `modeling_mixtral` of Hugging Face transformers). It is
//! the llama decoder with a mixture of experts. The weights are a softmax over the selected
//! experts.

use inference::Result;

use super::Decoder;
use super::llama::Variant;
use super::moe::{ExpertsAt, counts, experts, load as load_mixture};
use crate::checkpoint::ModelConfig;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::{Activation, FeedForward, Mixture, Router};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    load_mixture(config, weights, Variant::default(), &|b, _, prefix| {
        // In checkpoints of transformers 5, the block is named `mlp`.
        let old = format!("{prefix}.block_sparse_moe");
        let at = if b.weights.contains(&format!("{old}.gate.weight")) {
            old
        } else {
            format!("{prefix}.mlp")
        };
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
                weighing: Weighing::SoftmaxOfChosen,
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
