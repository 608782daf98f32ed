//! DBRX (Databricks 2024; reference: `modeling_dbrx` of Hugging Face transformers). Layer norms
//! have no biases. One matrix computes queries, keys and values, which are clamped. Experts are
//! stored as stacks of rows.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;
use serde_json::Value;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::gemma2::cap;
use super::llama::Variant;
use super::moe::{ExpertsAt, counts, experts, load as load_mixture, with_expert_slot};
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::expert_router::Weighing;
use crate::nn::{Activation, Experts, FeedForward, Mixture, Router, Weight};

/// The names of an expert's matrices: gate, up and down.
const PARTS: [&str; 3] = ["w1", "v1", "w2"];

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let weighing = match config.fields.get("moe_normalize_expert_weights") {
        None | Some(Value::Null) => Weighing::Share,
        Some(power) if power.as_f64() == Some(1.0) => Weighing::NormalizedShare,
        Some(power) => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("moe_normalize_expert_weights is {power}; supported are 1 and null"),
            ));
        }
    };
    let (count, per_token) = counts(config, "num_experts_per_tok")?;
    let variant = Variant {
        norms: NormKind::Layer { bias: false },
        fused: true,
        clip: cap(config, "clip_qkv")?,
        ..Variant::default()
    };
    load_mixture(config, weights, variant, &|b, _, prefix| {
        let at = format!("{prefix}.mlp");
        let activation = Gate::Plain(b.activation(Activation::Silu)?);
        let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
        let stacked = format!("{at}.experts.mlp");
        let experts = if b.weights.contains(&format!("{stacked}.w1")) {
            stacks(
                b,
                [&stacked, &format!("{at}.switch_mlp")],
                count,
                activation,
            )?
        } else {
            let places = ExpertsAt {
                stacked: format!("{at}.switch_mlp"),
                single: format!("{at}.experts"),
                parts: PARTS,
            };
            experts(b, &places, count, width, activation)?
        };
        Ok(FeedForward::Mixture(Box::new(Mixture {
            router: Router {
                linear: b.linear(&format!("{at}.gate"), hidden, count, false)?,
                per_token,
                weighing,
                choice_bias: None,
                groups: None,
                logit_cap: None,
            },
            experts,
            shared: None,
            scale: None,
            weighs_inputs: false,
        })))
    })
}

/// Loads the experts. Each matrix, `[experts * width, hidden]`, contains the rows of one expert
/// after another. Down matrices are stored transposed. `slots` is the prefix of the slots.
fn stacks(
    b: &mut Builder<'_>,
    [at, slots]: [&str; 2],
    count: i32,
    activation: Gate,
) -> Result<Experts> {
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let mut stack = |part: &str| -> Result<Array> {
        let rows = b
            .weights
            .tensor(&format!("{at}.{part}"), &[count * width, hidden])?;
        rows.reshape(&[count, width, hidden])
            .map_err(engine("weights"))
    };
    let [gate, up, down] = PARTS;
    let (gate, up) = (stack(gate)?, stack(up)?);
    let down = stack(down)?
        .swap_axes(-1, -2)
        .and_then(|down| down.contiguous())
        .map_err(engine("weights"))?;
    let gate = b.weights.expert_layer(Weight::Dense(gate), None)?;
    let up = b.weights.expert_layer(Weight::Dense(up), None)?;
    let down = b.weights.expert_output(Weight::Dense(down), None)?;
    Ok(Experts {
        gate: Some(with_expert_slot(b, &format!("{slots}.gate_proj"), gate)?),
        up: with_expert_slot(b, &format!("{slots}.up_proj"), up)?,
        down: with_expert_slot(b, &format!("{slots}.down_proj"), down)?,
        activation,
    })
}
