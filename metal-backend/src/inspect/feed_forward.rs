//! Feed-forward parts from inside: what they read, and their weights feature by feature.

use std::cell::RefCell;
use std::collections::BTreeMap;

use inference::{
    Error, ErrorKind, FeedForwardInputs, FeedForwardWeights, Interrupt, Prompt, Result,
};
use mlx_rs_core::{Array, Dtype, eval, eye};

use super::{Run, WHOLE, check_positions, run, wanted_in};
use crate::engine::Engine;
use crate::error::engine as engine_error;
use crate::exec::Matrix;
use crate::nn::hooks::Watch;
use crate::nn::{FeedForward, Linear};

/// Rows of a matrix that are read at once.
const ROWS: i32 = 256;

/// What the feed-forward part of each layer reads at `positions` of a prompt.
///
/// # Errors
/// When a position is not in the prompt, memory runs out, the model is closed, or `interrupt` says
/// so.
pub fn inputs(
    engine: &Engine,
    prompt: &Prompt,
    positions: &[usize],
    interrupt: &Interrupt,
) -> Result<FeedForwardInputs> {
    let tokens = engine.encode_prompt(prompt)?;
    engine.check_prompt(&tokens)?;
    check_positions(positions, tokens.len())?;
    let decoder = engine.decoder()?;
    let hidden = engine.info().hidden_size;
    let of = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    // Of each layer that shows them, a vector for each position.
    let mut found: BTreeMap<usize, BTreeMap<usize, Vec<f32>>> = BTreeMap::new();
    engine.scope(|| {
        let mut caches = of.decoder.new_caches(&WHOLE).for_sequence(tokens.len());
        let mut before = 0;
        run(of, &tokens, &mut caches, &mut |part, forward| {
            let (here, at) = wanted_in(positions, before, part.len());
            before += part.len();
            let seen = RefCell::new(Vec::new());
            let mut saw = |layer: usize, x: &Array| {
                if !at.is_empty() {
                    let vectors = x.take_ids(&at, 1)?.astype(Dtype::Float32)?;
                    seen.borrow_mut().push((layer, vectors));
                }
                Ok(())
            };
            let watch = Watch::feed_forward_inputs(&mut saw).instead_of_logits();
            let out = forward(watch).map_err(engine_error("inspect"))?;
            let seen = seen.into_inner();
            eval(seen.iter().map(|(_, x)| x).chain([&out])).map_err(engine_error("inspect"))?;
            for (layer, vectors) in &seen {
                let vectors = vectors.to_vec::<f32>().map_err(engine_error("inspect"))?;
                for (p, vector) in here.iter().zip(vectors.chunks_exact(hidden)) {
                    found.entry(*layer).or_default().insert(*p, vector.to_vec());
                }
            }
            Ok(())
        })
    })?;
    let mut inputs = FeedForwardInputs::default();
    inputs.tokens = tokens;
    inputs.positions = positions.to_vec();
    inputs.hidden_size = hidden;
    inputs.layers = (0..engine.info().num_layers)
        .map(|layer| {
            let own = found.get(&layer);
            let at = |p: &usize| own.and_then(|own| own.get(p));
            positions.iter().filter_map(at).flatten().copied().collect()
        })
        .collect();
    Ok(inputs)
}

/// The feed-forward part of a layer, feature by feature.
///
/// # Errors
/// When it has no features of its own (experts) or an adapter, and for a layer that is not there.
pub fn weights(engine: &Engine, layer: usize) -> Result<FeedForwardWeights> {
    let count = engine.info().num_layers;
    if layer >= count {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("layer {layer} is not there; the model has {count}, from 0"),
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
    let (gate, up, down, activation) = match part {
        Some(FeedForward::Gated(mlp)) => (&mlp.gate, Some(&mlp.up), &mlp.down, mlp.activation),
        Some(FeedForward::Plain(mlp)) => (&mlp.up, None, &mlp.down, mlp.activation),
        Some(FeedForward::Mixture(_)) => return Err(refused("it has experts")),
        Some(_) => return Err(refused("the layer has none")),
        None => return Err(refused("the layer computes it together with other parts")),
    };
    let hidden = engine.info().hidden_size;
    engine.scope(|| {
        let part_of = |linear: &Linear| -> Result<(Matrix, Option<Vec<f32>>)> {
            let (matrix, bias) = linear.part().ok_or_else(|| match linear.is_loaded() {
                true => refused("it has an adapter; take that off, or put it into the weights"),
                false => refused("it is not loaded, as the layer walks (walk_only)"),
            })?;
            let bias = bias.map(Array::to_f32_vec).transpose();
            Ok((matrix.clone(), bias.map_err(engine_error("weights"))?))
        };
        let mut weights = FeedForwardWeights::default();
        weights.hidden_size = hidden;
        weights.activation = activation.name().to_owned();
        let (matrix, bias) = part_of(gate)?;
        weights.gate = rows_of(&matrix, hidden)?;
        weights.gate_bias = bias;
        weights.features = weights.gate.len().checked_div(hidden).unwrap_or(0);
        if let Some(up) = up {
            let (matrix, bias) = part_of(up)?;
            weights.up = Some(rows_of(&matrix, hidden)?);
            weights.up_bias = bias;
        }
        let (matrix, bias) = part_of(down)?;
        weights.down = columns_of(&matrix, weights.features)?;
        weights.down_bias = bias;
        Ok(weights)
    })
}

/// The columns of a matrix `[out, inputs]`, one after another. They are its products with the
/// rows of the identity, so that any way of storing weights gives the numbers it computes with.
pub(super) fn columns_of(matrix: &Matrix, inputs: usize) -> Result<Vec<f32>> {
    let fault = engine_error("weights");
    let width = i32::try_from(inputs).unwrap_or(i32::MAX);
    let mut all = Vec::new();
    for from in (0..width).step_by(ROWS as usize) {
        let count = ROWS.min(width - from);
        // [count, inputs], ones at (i, from + i)
        let product = eye(count, width, from, Dtype::Float32)
            .and_then(|unit| matrix.product(&unit, false)?.to_f32_vec())
            .map_err(&fault)?;
        all.extend(product);
    }
    Ok(all)
}

/// The rows of a matrix `[out, inputs]`, one after another.
pub(super) fn rows_of(matrix: &Matrix, inputs: usize) -> Result<Vec<f32>> {
    let columns = columns_of(matrix, inputs)?;
    let outputs = columns.len().checked_div(inputs).unwrap_or(0);
    let mut rows = vec![0.0; columns.len()];
    for (input, column) in columns.chunks_exact(outputs.max(1)).enumerate() {
        for (output, value) in column.iter().enumerate() {
            if let Some(place) = rows.get_mut(output * inputs + input) {
                *place = *value;
            }
        }
    }
    Ok(rows)
}
