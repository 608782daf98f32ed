//! Granite 4 (IBM 2025; reference: `modeling_granitemoehybrid` of Hugging Face transformers):
//! Mamba-2 layers and attention layers, with Granite's factors. The feed-forward part is a shared
//! expert, with or without routed experts.

use inference::Result;

use super::Decoder;
use super::build::{Builder, invalid};
use super::build_attention::AttentionParts;
use super::mamba2::{Fields, grouped_norm, mixer, shape};
use super::moe::{ExpertsAt, counts, experts, fused_experts};
use super::stack::{Block, Stack};
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::moe::SharedExpert;
use crate::nn::{Activation, FeedForward, GatedMlp, Linear, Mixer, Mixture, Router};

/// The configuration's field names for the sizes of Mamba-2.
const FIELDS: Fields = Fields {
    heads: "mamba_n_heads",
    dim: "mamba_d_head",
    state: "mamba_d_state",
    groups: "mamba_n_groups",
    width: "mamba_d_conv",
};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let sizes = shape(config, &FIELDS)?;
    let projected = config.flag("mamba_proj_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::Silu)?;
    let residual = b.factor("residual_multiplier")?;
    let scale = config.number("attention_multiplier")?.unwrap_or(1.0);
    let rotates = config.fields.get("position_embedding_type") == Some(&"rope".into());
    let blocks = b.blocks(|b, i, prefix| {
        let mixer: Box<dyn Mixer> = if b.config.is_recurrent(i) {
            let at = format!("{prefix}.mamba");
            let norm = grouped_norm(b, &at, sizes)?;
            Box::new(mixer(b, &at, sizes, ([projected; 2], norm))?)
        } else {
            let parts = AttentionParts {
                qkv_bias: b.config.attention_bias,
                o_bias: b.config.attention_bias,
                no_rope: !rotates,
                ..AttentionParts::default()
            };
            let mut attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
            attention.scale = scale;
            Box::new(attention)
        };
        let mlp = feed_forward(b, prefix, activation)?;
        Ok(Block {
            residual: residual.clone(),
            ..b.pre_norm_block(prefix, mixer, mlp)?
        })
    })?;
    let mut head = b.head(Some(false))?;
    let divisor = config.number("logits_scaling")?.unwrap_or(1.0);
    if divisor != 1.0 {
        head.scale = Some(b.scalar(1.0 / divisor)?);
    }
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: b.factor("embedding_multiplier")?,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}

fn feed_forward(b: &mut Builder<'_>, prefix: &str, activation: Activation) -> Result<FeedForward> {
    // mlx-lm stores the dense feed-forward part under another name.
    if b.weights
        .contains(&format!("{prefix}.mlp.gate_proj.weight"))
    {
        let (width, bias) = (b.dims.intermediate, b.config.mlp_bias);
        let mlp = b.gated_mlp(&format!("{prefix}.mlp"), width, activation, bias)?;
        return Ok(FeedForward::Gated(mlp));
    }
    let width = "shared_intermediate_size";
    let width = b.part_of(
        width,
        b.config.required_uint(width, 1..=limits::INTERMEDIATE)?,
    )?;
    let shared = shared(b, &format!("{prefix}.shared_mlp"), width, activation)?;
    if b.config.num_experts == 0 {
        return Ok(FeedForward::Gated(shared));
    }
    let width = b.dims.intermediate;
    let shared = Some((SharedExpert::Gated(shared), None));
    mixture(b, prefix, width, activation, shared)
}

/// Builds the mixture at `block_sparse_moe`. Each expert has this width.
pub(super) fn mixture(
    b: &mut Builder<'_>,
    prefix: &str,
    width: i32,
    activation: Activation,
    shared: Option<(SharedExpert, Option<Linear>)>,
) -> Result<FeedForward> {
    let at = format!("{prefix}.block_sparse_moe");
    let (count, per_token) = counts(b.config, "num_experts_per_tok")?;
    let router = Router {
        linear: b.linear(&format!("{at}.router.layer"), b.dims.hidden, count, false)?,
        per_token,
        weighing: Weighing::SoftmaxOfChosen,
        choice_bias: None,
        groups: None,
        logit_cap: None,
    };
    let gate = Gate::Plain(activation);
    let fused = [
        format!("{at}.input_linear.weight"),
        format!("{at}.output_linear.weight"),
    ];
    let experts = if b.weights.contains(&fused[0]) {
        let slots = format!("{at}.switch_mlp");
        fused_experts(b, fused, &slots, count, width, gate)?
    } else {
        let places = ExpertsAt {
            stacked: format!("{at}.switch_mlp"),
            single: format!("{at}.experts"),
            parts: ["gate_proj", "up_proj", "down_proj"],
        };
        experts(b, &places, count, width, gate)?
    };
    Ok(FeedForward::Mixture(Box::new(Mixture {
        router,
        experts,
        shared,
        scale: None,
        weighs_inputs: false,
    })))
}

/// Loads the shared expert, whose gate and up are stored as one matrix.
fn shared(b: &mut Builder<'_>, at: &str, width: i32, activation: Activation) -> Result<GatedMlp> {
    let hidden = b.dims.hidden;
    // GGUF files store gate and up separately.
    if b.weights.contains(&format!("{at}.gate_proj.weight")) {
        return Ok(GatedMlp {
            gate: b.linear(&format!("{at}.gate_proj"), hidden, width, false)?,
            up: b.linear(&format!("{at}.up_proj"), hidden, width, false)?,
            down: b.linear(&format!("{at}.output_linear"), width, hidden, false)?,
            activation,
        });
    }
    let both = b.fused(&format!("{at}.input_linear"), hidden, &[width; 2], false)?;
    let [gate, up] =
        <[Linear; 2]>::try_from(both).map_err(|_| invalid("a fused matrix must have two parts"))?;
    Ok(GatedMlp {
        gate,
        up,
        down: b.linear(&format!("{at}.output_linear"), width, hidden, false)?,
        activation,
    })
}

/// Returns the number of bytes of one sequence's recurrent state in all layers.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config, &FIELDS)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
