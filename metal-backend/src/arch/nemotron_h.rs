//! Nemotron-H (NVIDIA 2025, arXiv:2504.03624; reference: `modeling_nemotron_h` of Hugging Face
//! transformers). Each block has only a mixer or a feed-forward part: Mamba-2, attention without
//! positions, a feed-forward part of two matrices, or experts of two matrices.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Dtype;
use serde_json::Value;

use super::Decoder;
use super::build::{Builder, invalid};
use super::build_attention::AttentionParts;
use super::mamba2::{Fields, grouped_norm, mixer, shape};
use super::moe::counts;
use super::stack::{Block, Stack};
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::{ExpertNames, Weights};
use crate::nn::expert_router::Weighing;
use crate::nn::mamba2::Mamba2Shape;
use crate::nn::moe::SharedExpert;
use crate::nn::{Activation, Experts, FeedForward, Mixer, Mixture, Mlp, NoMixer, Router};

/// The prefix of blocks in a checkpoint.
pub const BLOCKS: &str = "backbone.layers.";

/// The configuration's field names for the sizes of Mamba-2.
const FIELDS: Fields = Fields {
    heads: "mamba_num_heads",
    dim: "mamba_head_dim",
    state: "ssm_state_size",
    groups: "n_groups",
    width: "conv_kernel",
};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let sizes = shape(config, &FIELDS)?;
    let kinds = kinds(config)?;
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks_at(BLOCKS, |b, i, prefix| {
        let norm = Some(b.hidden_norm(&format!("{prefix}.norm"))?);
        let kind = kinds.get(i).map_or("", String::as_str);
        let (mixer, mlp) = part(b, (i, kind, &format!("{prefix}.mixer")), sizes)?;
        let mixes = matches!(mlp, FeedForward::Nothing);
        let (mixer_in, mlp_in) = if mixes { (norm, None) } else { (None, norm) };
        Ok(Block {
            mixer_in,
            mixer,
            mixer_out: None,
            mlp_in,
            mlp,
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("backbone.embeddings")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("backbone.norm_f")?,
        head: b.head(Some(false))?,
    }))
}

/// Returns the kind of each block, in the names of `layer_types`.
fn kinds(config: &ModelConfig) -> Result<Vec<String>> {
    let listed = config.fields.get("layer_types").and_then(Value::as_array);
    let kinds: Vec<String> = (listed.into_iter().flatten())
        .filter_map(|kind| kind.as_str().map(str::to_owned))
        .collect();
    if kinds.len() != config.num_hidden_layers {
        return Err(invalid(format!(
            "there are {} kinds of blocks for {} blocks",
            kinds.len(),
            config.num_hidden_layers
        )));
    }
    Ok(kinds)
}

/// Builds the mixer and the feed-forward part of a block. One of them has no effect.
fn part(
    b: &mut Builder<'_>,
    (i, kind, at): (usize, &str, &str),
    sizes: Mamba2Shape,
) -> Result<(Box<dyn Mixer>, FeedForward)> {
    let config = b.config;
    let mixed = |mixer: Box<dyn Mixer>| Ok((mixer, FeedForward::Nothing));
    let fed = |mlp: FeedForward| Ok((Box::new(NoMixer::default()) as Box<dyn Mixer>, mlp));
    match kind {
        _ if config.is_recurrent(i) => {
            let bias = config.flag("mamba_proj_bias")?.unwrap_or(false);
            let norm = grouped_norm(b, at, sizes)?;
            mixed(Box::new(mixer(b, at, sizes, ([bias; 2], norm))?))
        }
        _ if config.has_keys(i) => {
            let parts = AttentionParts {
                qkv_bias: config.attention_bias,
                o_bias: config.attention_bias,
                no_rope: true,
                ..AttentionParts::default()
            };
            mixed(Box::new(b.attention(i, at, parts)?))
        }
        "mlp" => fed(FeedForward::Plain(plain(b, at, b.dims.intermediate)?)),
        "moe" => fed(FeedForward::Mixture(Box::new(mixture(b, at)?))),
        other => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "block {i} is of kind {other:?}; supported are mamba, full_attention, mlp, moe"
            ),
        )),
    }
}

/// Returns the activation function between the two matrices.
fn activation(config: &ModelConfig) -> Result<Activation> {
    let name = config.fields.get("mlp_hidden_act").and_then(Value::as_str);
    let name = name.unwrap_or("relu2");
    Activation::from_name(name).ok_or_else(|| {
        let message = format!("mlp_hidden_act is {name:?}, which is not supported");
        Error::new(ErrorKind::Unsupported, message)
    })
}

fn plain(b: &mut Builder<'_>, at: &str, width: i32) -> Result<Mlp> {
    let (hidden, bias) = (b.dims.hidden, b.config.mlp_bias);
    Ok(Mlp {
        up: b.linear(&format!("{at}.up_proj"), hidden, width, bias)?,
        down: b.linear(&format!("{at}.down_proj"), width, hidden, bias)?,
        activation: activation(b.config)?,
    })
}

fn mixture(b: &mut Builder<'_>, at: &str) -> Result<Mixture> {
    let config = b.config;
    for (field, fine) in [("n_group", 1), ("moe_latent_size", 0)] {
        let value = config.uint(field, 0..=limits::HIDDEN)?.unwrap_or(fine);
        if value != fine {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{field} is {value}; only models without it are supported"),
            ));
        }
    }
    let hidden = b.dims.hidden;
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let width = |b: &Builder<'_>, name: &str| -> Result<i32> {
        b.part_of(name, config.required_uint(name, 1..=limits::INTERMEDIATE)?)
    };
    let expert_width = width(b, "moe_intermediate_size")?;
    let bias = format!("{at}.gate.e_score_correction_bias");
    let choice_bias = (b.weights.vector(&bias, count)?)
        .astype(Dtype::Float32)
        .map_err(engine("weights"))?;
    let mut stack = |stacked: &str, single: &str, inputs, outputs| {
        let stacked = format!("{at}.switch_mlp.{stacked}");
        let names = ExpertNames {
            stacked: &stacked,
            single: &|e| format!("{at}.experts.{e}.{single}"),
        };
        b.weights.experts(&names, count, inputs, outputs, false)
    };
    let experts = Experts {
        gate: None,
        up: stack("fc1", "up_proj", hidden, expert_width)?,
        down: stack("fc2", "down_proj", expert_width, hidden)?,
        activation: Gate::Plain(activation(config)?),
    };
    let shared = match config.uint("n_shared_experts", 0..=limits::EXPERTS)? {
        None | Some(0) => None,
        Some(_) => {
            let width = width(b, "moe_shared_expert_intermediate_size")?;
            let mlp = plain(b, &format!("{at}.shared_experts"), width)?;
            Some((SharedExpert::Plain(mlp), None))
        }
    };
    Ok(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.gate"), hidden, count, false)?,
            per_token,
            weighing: Weighing::Sigmoid {
                normalized: per_token > 1 && config.flag("norm_topk_prob")?.unwrap_or(true),
                scale: config.number("routed_scaling_factor")?.unwrap_or(1.0),
                eps: 1e-20,
            },
            choice_bias: Some(choice_bias),
            groups: None,
            logit_cap: None,
        },
        experts,
        shared,
        scale: None,
        weighs_inputs: false,
    })
}

/// Returns the number of bytes of one sequence's recurrent state in all blocks.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config, &FIELDS)?.layout();
    Ok(super::state_bytes::of_recurrent_layers(config, &layout))
}
