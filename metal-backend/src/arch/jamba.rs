//! Jamba (Lieber et al. 2024, arXiv:2403.19887; reference: `modeling_jamba` of Hugging Face
//! transformers): Mamba layers, and attention layers without positions. Some layers have experts.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::mamba::{self, Fields, mixer};
use super::moe::{ExpertsAt, USUAL_PARTS, counts, dense_layers, experts};
use super::stack::Stack;
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::{Activation, FeedForward, MambaShape, Mixer, Mixture, Router};

/// The configuration's field names for the sizes of Mamba.
const FIELDS: Fields = Fields {
    state: "mamba_d_state",
    rank: "mamba_dt_rank",
    width: "mamba_d_conv",
};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let sizes = shape(config)?;
    let projected = config.flag("mamba_proj_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let part: Box<dyn Mixer> = if b.config.is_recurrent(i) {
            let at = format!("{prefix}.mamba");
            let norms = [
                b.norm(&format!("{at}.dt_layernorm"), sizes.rank)?,
                b.norm(&format!("{at}.b_layernorm"), sizes.state)?,
                b.norm(&format!("{at}.c_layernorm"), sizes.state)?,
            ];
            Box::new(mixer(b, &at, sizes, (projected, Some(norms)))?)
        } else {
            let parts = AttentionParts {
                no_rope: true,
                ..AttentionParts::default()
            };
            Box::new(b.attention(i, &format!("{prefix}.self_attn"), parts)?)
        };
        let mlp = feed_forward(b, i, prefix)?;
        b.pre_norm_block(prefix, part, mlp)
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

/// Returns the sizes of Mamba layers.
fn shape(config: &ModelConfig) -> Result<MambaShape> {
    let expand = config.required_uint("mamba_expand", 1..=limits::EXPERTS)?;
    mamba::shape(config, &FIELDS, config.hidden_size.saturating_mul(expand))
}

/// Builds a mixture of experts, or a dense feed-forward part in layers without experts.
fn feed_forward(b: &mut Builder<'_>, i: usize, prefix: &str) -> Result<FeedForward> {
    let config = b.config;
    let at = format!("{prefix}.mlp");
    let (width, activation) = (b.dims.intermediate, b.activation(Activation::Silu)?);
    if dense_layers(config)?.get(i) == Some(&true) {
        return Ok(FeedForward::Gated(
            b.gated_mlp(&at, width, activation, false)?,
        ));
    }
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let places = ExpertsAt {
        stacked: format!("{at}.switch_mlp"),
        single: format!("{at}.experts"),
        parts: USUAL_PARTS,
    };
    Ok(FeedForward::Mixture(Box::new(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.router"), b.dims.hidden, count, false)?,
            per_token,
            weighing: Weighing::Share,
            choice_bias: None,
            groups: None,
            logit_cap: None,
        },
        experts: experts(b, &places, count, width, Gate::Plain(activation))?,
        shared: None,
        scale: None,
        weighs_inputs: false,
    })))
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    Ok(super::state_bytes::of_recurrent_layers(
        config,
        &shape(config)?.layout(),
    ))
}
