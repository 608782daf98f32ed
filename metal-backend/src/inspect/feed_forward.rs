//! Inspects feed-forward blocks: their inputs, activations and weights per feature.

use std::cell::RefCell;
use std::collections::BTreeMap;

use inference::{
    Error, ErrorKind, FeedForwardActivations, FeedForwardInputs, FeedForwardWeights, Interrupt,
    Prompt, Result, Steering,
};
use mlx_rs_core::{Array, Dtype, eval};

use super::{Run, WHOLE, check_positions, run, wanted_in};
use crate::engine::Engine;
use crate::error::engine as engine_error;
use crate::exec::{Activation, ExpertGate};
use crate::nn::hooks::Watch;
use crate::nn::{Experts, FeedForward, Linear};
use crate::steer::{edits_of, hook};

/// Returns the input of each layer's feed-forward block, at `positions` of a prompt.
///
/// # Errors
/// If a position is outside the prompt, memory runs out, the model is closed, or the caller
/// interrupts.
pub fn inputs(
    engine: &Engine,
    prompt: &Prompt,
    positions: &[usize],
    interrupt: &Interrupt,
) -> Result<FeedForwardInputs> {
    let of = (prompt, None);
    let (tokens, layers) = seen(engine, of, positions, interrupt, Seen::Inputs)?;
    let mut inputs = FeedForwardInputs::default();
    inputs.tokens = tokens;
    inputs.positions = positions.to_vec();
    inputs.hidden_size = engine.info().hidden_size;
    inputs.layers = layers;
    Ok(inputs)
}

/// Returns the input of each layer's down matrix, at `positions` of a prompt. Applies `steering`,
/// if there is any.
///
/// # Errors
/// The errors of [`inputs`].
pub fn activations(
    engine: &Engine,
    of: (&Prompt, Option<&Steering>),
    positions: &[usize],
    interrupt: &Interrupt,
) -> Result<FeedForwardActivations> {
    let (tokens, layers) = seen(engine, of, positions, interrupt, Seen::Activations)?;
    let mut activations = FeedForwardActivations::default();
    activations.tokens = tokens;
    activations.positions = positions.to_vec();
    activations.layers = layers;
    Ok(activations)
}

/// Which vectors to collect.
#[derive(Clone, Copy)]
enum Seen {
    Inputs,
    Activations,
}

/// Returns the tokens of a prompt and, for each layer, the concatenated vectors at `positions`.
fn seen(
    engine: &Engine,
    (prompt, steering): (&Prompt, Option<&Steering>),
    positions: &[usize],
    interrupt: &Interrupt,
    what: Seen,
) -> Result<(Vec<u32>, Vec<Vec<f32>>)> {
    let tokens = engine.encode_prompt(prompt)?;
    engine.check_prompt(&tokens)?;
    check_positions(positions, tokens.len())?;
    let decoder = engine.decoder()?;
    let of = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    // Maps a layer to its vectors by position. Layers without such vectors are absent.
    let mut by_layer: BTreeMap<usize, BTreeMap<usize, Vec<f32>>> = BTreeMap::new();
    engine.scope(|| {
        let mut caches = of.decoder.new_caches(&WHOLE).for_sequence(tokens.len());
        let mut edits = edits_of((engine, of.decoder), steering, tokens.len(), interrupt)?;
        let mut before = 0;
        run(of, &tokens, &mut caches, &mut |part, forward| {
            let (wanted, at) = wanted_in(positions, before, part.len());
            before += part.len();
            let seen = RefCell::new(Vec::new());
            let mut saw = |layer: usize, x: &Array| {
                if !at.is_empty() {
                    let vectors = x.take_ids(&at, 1)?.astype(Dtype::Float32)?;
                    seen.borrow_mut().push((layer, vectors));
                }
                Ok(())
            };
            let watch = match what {
                Seen::Inputs => Watch::feed_forward_inputs(&mut saw),
                Seen::Activations => Watch::activations(&mut saw),
            };
            let watch = watch.edited(hook(&mut edits)).instead_of_logits();
            let out = forward(watch).map_err(engine_error("inspect"))?;
            let seen = seen.into_inner();
            eval(seen.iter().map(|(_, x)| x).chain([&out])).map_err(engine_error("inspect"))?;
            for (layer, vectors) in &seen {
                let vectors = vectors.to_vec::<f32>().map_err(engine_error("inspect"))?;
                let width = (vectors.len() / wanted.len().max(1)).max(1);
                for (p, vector) in wanted.iter().zip(vectors.chunks_exact(width)) {
                    by_layer
                        .entry(*layer)
                        .or_default()
                        .insert(*p, vector.to_vec());
                }
            }
            Ok(())
        })
    })?;
    let layers = (0..engine.info().num_layers)
        .map(|layer| {
            let of_layer = by_layer.get(&layer);
            let at = |p: &usize| of_layer.and_then(|of_layer| of_layer.get(p));
            positions.iter().filter_map(at).flatten().copied().collect()
        })
        .collect();
    Ok((tokens, layers))
}

/// Returns the weights of a layer's feed-forward block, feature by feature.
///
/// # Errors
/// If the layer has no separate features, has an adapter, or does not exist.
pub fn weights(engine: &Engine, layer: usize) -> Result<FeedForwardWeights> {
    let count = engine.info().num_layers;
    if layer >= count {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("layer {layer} does not exist; the model has {count} layers, numbered from 0"),
        ));
    }
    let refused = |why: &str| {
        let message = format!("the feed-forward part of layer {layer} cannot be shown: {why}");
        Error::new(ErrorKind::Unsupported, message)
    };
    if engine.is_part() {
        return Err(refused("this process has a part of it only"));
    }
    let decoder = engine.decoder()?;
    let part = decoder.feed_forward(layer).map(FeedForward::trained);
    engine.scope(|| features_of(part, layer, engine.info().hidden_size))
}

/// Returns the weights of the features of `part`, in a layer whose states have `hidden` elements.
///
/// # Errors
/// The errors of [`weights`].
pub fn features_of(
    part: Option<&FeedForward>,
    layer: usize,
    hidden: usize,
) -> Result<FeedForwardWeights> {
    let refused = |why: &str| {
        let message = format!("the feed-forward part of layer {layer} cannot be shown: {why}");
        Error::new(ErrorKind::Unsupported, message)
    };
    let fault = engine_error("weights");
    let (gate, up, down, activation) = match part {
        Some(FeedForward::Gated(mlp)) => (&mlp.gate, Some(&mlp.up), &mlp.down, mlp.activation),
        Some(FeedForward::Plain(mlp)) => (&mlp.up, None, &mlp.down, mlp.activation),
        Some(FeedForward::Mixture(mixture)) => {
            if mixture.is_adapted() {
                return Err(refused(ADAPTED));
            }
            let ExpertGate::Plain(activation) = mixture.experts.activation else {
                return Err(refused("the gate of its experts is clamped"));
            };
            return features_of_experts(&mixture.experts, activation, hidden).map_err(fault);
        }
        Some(FeedForward::Scaled(_)) => {
            return Err(refused("its gate and its output have factors"));
        }
        Some(FeedForward::Limited(_)) => return Err(refused("its gate has limits")),
        Some(_) => return Err(refused("the layer has none")),
        None => return Err(refused("the layer computes it together with other parts")),
    };
    if let Activation::Xielu { .. } = activation {
        return Err(refused("its activation has learned factors"));
    }
    let part_of = |linear: &Linear| -> Result<(Array, Option<Vec<f32>>)> {
        let (matrix, bias) = linear.part().ok_or_else(|| match linear.is_loaded() {
            true => refused(ADAPTED),
            false => refused("it is not loaded, as the layer walks (walk_only)"),
        })?;
        let bias = bias.map(Array::to_f32_vec).transpose();
        Ok((matrix.dense().map_err(&fault)?, bias.map_err(&fault)?))
    };
    let numbers = |array: Array| array.to_f32_vec().map_err(&fault);
    let mut weights = FeedForwardWeights::default();
    weights.hidden_size = hidden;
    weights.activation = activation.name().to_owned();
    let (matrix, bias) = part_of(gate)?;
    weights.gate = numbers(matrix)?;
    weights.gate_bias = bias;
    weights.features = weights.gate.len().checked_div(hidden).unwrap_or(0);
    if let Some(up) = up {
        let (matrix, bias) = part_of(up)?;
        weights.up = Some(numbers(matrix)?);
        weights.up_bias = bias;
    }
    let (matrix, bias) = part_of(down)?;
    weights.down = numbers(matrix.swap_axes(0, 1).map_err(&fault)?)?;
    weights.down_bias = bias;
    Ok(weights)
}

const ADAPTED: &str = "it has an adapter; remove it, or fuse it into the weights";

/// Returns the features of all experts, expert by expert.
fn features_of_experts(
    experts: &Experts,
    activation: Activation,
    hidden: usize,
) -> mlx_rs_core::Result<FeedForwardWeights> {
    let bias = |bias: Option<Array>| bias.as_ref().map(Array::to_f32_vec).transpose();
    let first = experts.gate.as_ref().unwrap_or(&experts.up);
    let mut weights = FeedForwardWeights::default();
    weights.hidden_size = hidden;
    weights.activation = activation.name().to_owned();
    let (matrix, bias_of_rows) = first.dense()?;
    weights.experts = usize::try_from(matrix.dim(0)?).ok();
    weights.gate = matrix.to_f32_vec()?;
    weights.gate_bias = bias(bias_of_rows)?;
    weights.features = weights.gate.len().checked_div(hidden).unwrap_or(0);
    if experts.gate.is_some() {
        let (matrix, bias_of_rows) = experts.up.dense()?;
        weights.up = Some(matrix.to_f32_vec()?);
        weights.up_bias = bias(bias_of_rows)?;
    }
    let (matrix, bias_of_rows) = experts.down.dense()?;
    weights.down = matrix.swap_axes(-1, -2)?.to_f32_vec()?; // [experts, features, hidden]
    weights.down_bias = bias(bias_of_rows)?;
    Ok(weights)
}
