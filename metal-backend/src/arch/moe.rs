//! Helpers for mixtures of experts: the lookup of their matrices, the llama decoder with mixtures
//! of experts, and the mixtures of the Qwen families.

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, int, invalid};
use super::llama::{Variant, stack_of};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::{ExpertNames, Weights};
use crate::nn::adapter::{SlotKind, SlotView};
use crate::nn::expert_router::{Groups, Weighing};
use crate::nn::moe::SharedExpert;
use crate::nn::{
    Activation, ExpertLinear, Experts, FeedForward, LimitedMlp, Mixture, Router, Weight,
};

/// The tensor names of a block's experts.
pub struct ExpertsAt<'a> {
    /// The prefix of the stacks `gate_proj`, `up_proj` and `down_proj`.
    pub stacked: String,
    /// The prefix of separately stored experts, and of fused stacks (`gate_up_proj`, `down_proj`).
    pub single: String,
    /// The names of a single expert's three matrices.
    pub parts: [&'a str; 3],
}

/// Loads the experts of one block.
pub fn experts(
    b: &mut Builder<'_>,
    at: &ExpertsAt<'_>,
    count: i32,
    width: i32,
    activation: Gate,
) -> Result<Experts> {
    let hidden = b.dims.hidden;
    let fused = format!("{}.gate_up_proj", at.single);
    if b.weights.contains(&fused) {
        let names = [fused, format!("{}.down_proj", at.single)];
        return fused_experts(b, names, &at.stacked, count, width, activation);
    }
    // In GGUF files, one stack may combine gate and up.
    let fused = format!("{}.gate_up_proj", at.stacked);
    if b.weights.contains(&format!("{fused}.weight")) {
        let names = [fused, format!("{}.down_proj", at.stacked)];
        return fused_experts(b, names, &at.stacked, count, width, activation);
    }
    let mut one = |stacked: &str, single: &str, inputs, outputs| {
        let stacked = format!("{}.{stacked}", at.stacked);
        let names = ExpertNames {
            stacked: &stacked,
            single: &|e| format!("{}.{e}.{single}", at.single),
        };
        b.weights.experts(&names, count, inputs, outputs, false)
    };
    let [gate, up, down] = at.parts;
    Ok(Experts {
        gate: Some(one("gate_proj", gate, hidden, width)?),
        up: one("up_proj", up, hidden, width)?,
        down: one("down_proj", down, width, hidden)?,
        activation,
    })
}

/// Loads experts from two stacks with these names. The first combines gate and up, `[experts,
/// 2 * width, hidden]`; the second has down. `slots` is the prefix of the slots `gate_proj`,
/// `up_proj` and `down_proj`.
pub fn fused_experts(
    b: &mut Builder<'_>,
    [gate_up, down]: [String; 2],
    slots: &str,
    count: i32,
    width: i32,
    activation: Gate,
) -> Result<Experts> {
    let hidden = b.dims.hidden;
    let stored = match b.weights.split() {
        Some(split) => width.saturating_mul(int("processes", split.processes())?),
        None => width,
    };
    let turned = [[hidden, 2 * stored], [stored, hidden]];
    // Stacks in GGUF files may be quantized.
    let stacked = |b: &mut Builder<'_>, name: &str, shape: &[i32]| match b.weights.is_gguf() {
        true => b.weights.stack(name, shape),
        false => b.weights.expert_tensor(name, shape).map(Weight::Dense),
    };
    // Qwen3-VL and Llama 4 store `[experts, in, out]`. One of the two matrices may be square, so
    // both shapes are compared.
    let is_turned = [&gate_up, &down]
        .into_iter()
        .zip(turned)
        .all(|(name, size)| {
            let size = size.map(|n| n.unsigned_abs() as usize);
            b.weights.shape(name).is_some_and(|s| s[1..] == size)
        });
    if is_turned {
        let mut turned = |name: &str, shape: &[i32]| -> Result<Weight> {
            let stack = b.weights.turned_experts(name, shape)?.swap_axes(-1, -2);
            let stack = stack.and_then(|stack| stack.contiguous());
            stack.map(Weight::Dense).map_err(engine("weights"))
        };
        let both = turned(&gate_up, &[count, hidden, 2 * width])?;
        let down = turned(&down, &[count, width, hidden])?;
        return joined_experts(b, (&both, down), slots, width, activation);
    }
    let both = stacked(b, &gate_up, &[count, 2 * width, hidden])?;
    let down = stacked(b, &down, &[count, hidden, width])?;
    joined_experts(b, (&both, down), slots, width, activation)
}

/// Builds experts from two stacks. The first combines gate and up. `slots` is the prefix of the
/// slots.
fn joined_experts(
    b: &mut Builder<'_>,
    (both, down): (&Weight, Weight),
    slots: &str,
    width: i32,
    activation: Gate,
) -> Result<Experts> {
    let mut half = |part: &str, from: i32| -> Result<ExpertLinear> {
        let rows = both.rows(from, from + width).map_err(engine("weights"))?;
        let layer = b.weights.expert_layer(rows, None)?;
        with_expert_slot(b, &format!("{slots}.{part}"), layer)
    };
    let (gate, up) = (half("gate_proj", 0)?, half("up_proj", width)?);
    let down = b.weights.expert_output(down, None)?;
    Ok(Experts {
        gate: Some(gate),
        up,
        down: with_expert_slot(b, &format!("{slots}.down_proj"), down)?,
        activation,
    })
}

/// Adds a slot to a layer. `name` is the name of the layer's stack in checkpoints of mlx-lm, and so
/// in adapters.
pub fn with_expert_slot(
    b: &mut Builder<'_>,
    name: &str,
    layer: ExpertLinear,
) -> Result<ExpertLinear> {
    let weight = layer.weight().map_err(engine("weights"))?;
    let slot = b.weights.slot(name, SlotKind::Matrix, &weight);
    Ok(layer.at(SlotView::new(slot, None)))
}

/// Returns the number of experts, and the number of experts per token.
///
/// # Errors
/// If the configuration lacks these numbers or they are impossible.
pub fn counts(config: &ModelConfig, per_token: &str) -> Result<(i32, i32)> {
    let names = ["num_local_experts", "n_routed_experts"];
    let named = |name: &&str| config.fields.contains_key(*name);
    let name = names.into_iter().find(named).unwrap_or("num_experts");
    let experts = config.required_uint(name, 1..=limits::EXPERTS)?;
    let k = config.required_uint(per_token, 1..=experts)?;
    Ok((int(name, experts)?, int(per_token, k)?))
}

/// Builds a Qwen block's mixture, or its dense feed-forward part if the layer has no experts.
pub fn qwen_block(
    b: &mut Builder<'_>,
    i: usize,
    prefix: &str,
    shared: bool,
) -> Result<FeedForward> {
    let config = b.config;
    let at = format!("{prefix}.mlp");
    let activation = b.activation(Activation::Silu)?;
    let step = config
        .uint("decoder_sparse_step", 1..=usize::MAX)?
        .unwrap_or(1);
    let plain = config.numbers("mlp_only_layers")?.unwrap_or_default();
    if plain.contains(&(i as f32)) || !(i + 1).is_multiple_of(step) {
        let mlp = b.gated_mlp(&at, b.dims.intermediate, activation, false)?;
        return Ok(FeedForward::Gated(mlp));
    }
    let width = |b: &Builder<'_>, name: &str| {
        let total = config.required_uint(name, 1..=limits::INTERMEDIATE)?;
        b.part_of(name, total)
    };
    let hidden = b.dims.hidden;
    let shared = if shared {
        let width = width(b, "shared_expert_intermediate_size")?;
        let part = b.gated_mlp(&format!("{at}.shared_expert"), width, activation, false)?;
        let gate = b.linear(&format!("{at}.shared_expert_gate"), hidden, 1, false)?;
        Some((SharedExpert::Gated(part), Some(gate)))
    } else {
        None
    };
    let width = width(b, "moe_intermediate_size")?;
    let mut mixture = shares(b, &at, width)?;
    mixture.shared = shared;
    Ok(FeedForward::Mixture(Box::new(mixture)))
}

/// Builds a mixture at `mlp` whose experts have this width. A softmax weights the experts.
pub fn share_block(b: &mut Builder<'_>, prefix: &str, width: i32) -> Result<FeedForward> {
    let mixture = shares(b, &format!("{prefix}.mlp"), width)?;
    Ok(FeedForward::Mixture(Box::new(mixture)))
}

fn shares(b: &mut Builder<'_>, at: &str, width: i32) -> Result<Mixture> {
    let config = b.config;
    let activation = b.activation(Activation::Silu)?;
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let places = ExpertsAt {
        stacked: format!("{at}.switch_mlp"),
        single: format!("{at}.experts"),
        parts: USUAL_PARTS,
    };
    Ok(Mixture {
        router: Router {
            linear: b.linear(&format!("{at}.gate"), b.dims.hidden, count, false)?,
            per_token,
            weighing: match config.flag("norm_topk_prob")?.unwrap_or(false) {
                true => Weighing::NormalizedShare,
                false => Weighing::Share,
            },
            choice_bias: None,
            groups: None,
            logit_cap: None,
        },
        experts: experts(b, &places, count, width, Gate::Plain(activation))?,
        shared: None,
        scale: None,
        weighs_inputs: false,
    })
}

/// Returns whether each layer is dense. `mlp_layer_types` determines this; without this field, the
/// first `first_k_dense_replace` layers are dense.
pub fn dense_layers(config: &ModelConfig) -> Result<Vec<bool>> {
    let layers = config.num_hidden_layers;
    let Some(listed) = config
        .fields
        .get("mlp_layer_types")
        .filter(|v| !v.is_null())
    else {
        let dense = config.uint("first_k_dense_replace", 0..=limits::LAYERS)?;
        return Ok((0..layers).map(|i| i < dense.unwrap_or(0)).collect());
    };
    let kinds = listed.as_array().filter(|kinds| kinds.len() == layers);
    let kinds = kinds.ok_or_else(|| {
        invalid(format!(
            "mlp_layer_types must be a list of {layers} names, one for each layer"
        ))
    })?;
    kinds
        .iter()
        .map(|kind| match kind.as_str() {
            Some("dense") => Ok(true),
            Some("sparse") => Ok(false),
            _ => Err(invalid(
                "mlp_layer_types has an unknown name; known are dense, sparse",
            )),
        })
        .collect()
}

/// Builds the feed-forward part of families with `DeepSeek`'s field names. The first layers are
/// dense. Other layers have a router `gate` with an optional selection bias, optional groups, and
/// shared experts.
///
/// # Errors
/// If a tensor is missing or has another shape; [`ErrorKind::Unsupported`] for an unknown scoring
/// function.
pub fn routed_block(
    b: &mut Builder<'_>,
    i: usize,
    prefix: &str,
    parts: [&str; 3],
) -> Result<FeedForward> {
    limited_block(b, i, prefix, parts, Limits::default())
}

/// Upper limits on the gates of a block ([`Gate::Limited`]).
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// The limit in chosen experts.
    pub experts: Option<f32>,
    /// The limit in shared experts, and in a dense block.
    pub shared: Option<f32>,
}

/// Builds the feed-forward part as [`routed_block`] does, with limits on the gates.
///
/// # Errors
/// The errors of [`routed_block`].
pub fn limited_block(
    b: &mut Builder<'_>,
    i: usize,
    prefix: &str,
    parts: [&str; 3],
    limits: Limits,
) -> Result<FeedForward> {
    let config = b.config;
    let at = format!("{prefix}.mlp");
    let activation = b.activation(Activation::Silu)?;
    if config
        .uint("moe_layer_freq", 1..=limits::LAYERS)?
        .unwrap_or(1)
        != 1
    {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "moe_layer_freq is not 1: dense layers between those with experts are not supported",
        ));
    }
    let is_dense = dense_layers(config)?.get(i) == Some(&true);
    let bias = config.flag("use_bias")?.unwrap_or(false);
    if is_dense {
        let mlp = b.gated_mlp(&at, b.dims.intermediate, activation, bias)?;
        return Ok(match limits.shared {
            Some(limit) => FeedForward::Limited(Box::new(LimitedMlp { mlp, limit })),
            None => FeedForward::Gated(mlp),
        });
    }
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let width = config.required_uint("moe_intermediate_size", 1..=limits::INTERMEDIATE)?;
    let shared_count = config.uint("n_shared_experts", 0..=limits::EXPERTS)?;
    let shared_width = config
        .uint(
            "moe_shared_expert_intermediate_size",
            1..=limits::INTERMEDIATE,
        )?
        .unwrap_or(width);
    let shared = match shared_count.unwrap_or(0) {
        0 => None,
        n => {
            let width = b.part_of("n_shared_experts", n.saturating_mul(shared_width))?;
            let at = format!("{at}.shared_experts");
            let mlp = b.gated_mlp(&at, width, activation, bias)?;
            let shared = match limits.shared {
                Some(limit) => SharedExpert::Limited(LimitedMlp { mlp, limit }),
                None => SharedExpert::Gated(mlp),
            };
            Some((shared, None))
        }
    };
    let bias_name = format!("{at}.gate.e_score_correction_bias");
    let choice_bias = match b.weights.shape(&bias_name) {
        // ERNIE stores the bias as a row.
        Some([1, _]) => {
            let bias = b.weights.tensor(&bias_name, &[1, count])?;
            Some(bias.reshape(&[count]).map_err(engine("weights"))?)
        }
        Some(_) => Some(b.weights.vector(&bias_name, count)?),
        None => None,
    };
    let router = Router {
        linear: b.linear(&format!("{at}.gate"), b.dims.hidden, count, false)?,
        per_token,
        weighing: weighing(config)?,
        choice_bias,
        groups: groups(config, count)?,
        logit_cap: config
            .number("moe_router_logit_softcapping")?
            .filter(|cap| *cap > 0.0),
    };
    let single = format!("{at}.experts");
    let places = ExpertsAt {
        // Step 3.5 stores stacks under the name that other families use for single experts.
        stacked: match b.weights.contains(&format!("{single}.gate_proj.weight")) {
            true => single.clone(),
            false => format!("{at}.switch_mlp"),
        },
        single,
        parts,
    };
    let gate = match limits.experts {
        Some(limit) => Gate::Limited { activation, limit },
        None => Gate::Plain(activation),
    };
    let width = b.part_of("moe_intermediate_size", width)?;
    Ok(FeedForward::Mixture(Box::new(Mixture {
        router,
        experts: experts(b, &places, count, width, gate)?,
        shared,
        scale: None,
        weighs_inputs: false,
    })))
}

/// The usual names of a single expert's matrices.
pub const USUAL_PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Returns how experts are weighted, according to `scoring_func`, `norm_topk_prob` and
/// `routed_scaling_factor`.
fn weighing(config: &ModelConfig) -> Result<Weighing> {
    let normalized = config.flag("norm_topk_prob")?.unwrap_or(true);
    let scale = config.number("routed_scaling_factor")?.unwrap_or(1.0);
    let eps = 1e-20;
    match config.fields.get("scoring_func").and_then(|v| v.as_str()) {
        None | Some("sigmoid" | "noaux_tc") => Ok(Weighing::Sigmoid {
            normalized,
            scale,
            eps,
        }),
        Some("softmax") => Ok(Weighing::Softmax {
            normalized,
            scale,
            eps,
        }),
        Some("sqrtsoftplus") => Ok(Weighing::RootSoftplus {
            normalized,
            scale,
            eps,
        }),
        Some(other) => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "scoring_func {other:?} is not supported; supported are sigmoid, softmax, sqrtsoftplus"
            ),
        )),
    }
}

/// Returns the groups of experts, according to `n_group` and `topk_group`.
fn groups(config: &ModelConfig, experts: i32) -> Result<Option<Groups>> {
    let experts = experts.unsigned_abs() as usize;
    let count = config.uint("n_group", 1..=experts)?.unwrap_or(1);
    let method = config.fields.get("topk_method").and_then(|v| v.as_str());
    if count == 1 || matches!(method, Some("greedy" | "gready")) {
        return Ok(None);
    }
    if !experts.is_multiple_of(count) {
        return Err(invalid(format!(
            "n_group is {count}; it must divide the number of experts, which is {experts}"
        )));
    }
    let top_groups = config.required_uint("topk_group", 1..=count)?;
    Ok(Some(Groups {
        count: int("n_group", count)?,
        selected: int("topk_group", top_groups)?,
        // DeepSeek V2 ranks groups by their best expert. Later models use the sum of the two best.
        best: match method {
            Some("group_limited_greedy") => 1,
            _ => 2,
        },
    }))
}

/// Builds the llama decoder. `mlp` builds the feed-forward parts.
pub fn load(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
    mlp: &dyn Fn(&mut Builder<'_>, usize, &str) -> Result<FeedForward>,
) -> Result<Box<dyn Decoder>> {
    Ok(Box::new(stack_of(config, weights, variant, mlp)?))
}
