//! Computes what each block adds to the residual stream, and the attention weights.

use std::cell::RefCell;
use std::collections::BTreeMap;

use inference::{
    AttentionWeights, Error, ErrorKind, Interrupt, LayerTrace, Prompt, ResidualTrace, Result,
    Steering,
};
use mlx_rs_core::{Array, Dtype, eval};

use super::{Run, WHOLE, check_positions, run, wanted_in};
use crate::engine::Engine;
use crate::error::engine as engine_error;
use crate::nn::hooks::Watch;
use crate::steer::{edits_of, hook, watch};

/// Returns the residual stream of a prompt at `positions`, and each part's contribution to it.
/// Applies `steering`, if there is any.
///
/// # Errors
/// If a position is outside the prompt, memory runs out, the model is closed, or the caller
/// interrupts.
pub fn residuals(
    engine: &Engine,
    (prompt, steering): (&Prompt, Option<&Steering>),
    positions: &[usize],
    interrupt: &Interrupt,
) -> Result<ResidualTrace> {
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
    // Maps a position to the embedding, then two vectors per layer (after the mixer and after the
    // block).
    let mut by_position: BTreeMap<usize, Vec<Vec<f32>>> = BTreeMap::new();
    engine.scope(|| {
        let mut caches = of.decoder.new_caches(&WHOLE).for_sequence(tokens.len());
        let mut edits = edits_of((engine, of.decoder), steering, tokens.len(), interrupt)?;
        let mut before = 0;
        run(of, &tokens, &mut caches, &mut |part, forward| {
            let (wanted, at) = wanted_in(positions, before, part.len());
            before += part.len();
            let seen = RefCell::new(Vec::new());
            let saw = |x: &Array| {
                if !at.is_empty() {
                    let vectors = x.take_ids(&at, 1)?.astype(Dtype::Float32)?;
                    seen.borrow_mut().push(vectors);
                }
                Ok(())
            };
            let (mut states, mut mixed) = (|_, x: &Array| saw(x), |_, x: &Array| saw(x));
            let watch = Watch::parts(&mut states, &mut mixed).edited(hook(&mut edits));
            let out = forward(watch.instead_of_logits()).map_err(engine_error("trace"))?;
            let seen = seen.into_inner();
            eval(seen.iter().chain([&out])).map_err(engine_error("trace"))?;
            for vectors in &seen {
                let vectors = vectors.to_vec::<f32>().map_err(engine_error("trace"))?;
                for (p, vector) in wanted.iter().zip(vectors.chunks_exact(hidden)) {
                    by_position.entry(*p).or_default().push(vector.to_vec());
                }
            }
            Ok(())
        })
    })?;
    let mut trace = ResidualTrace::default();
    trace.tokens = tokens;
    trace.positions = positions.to_vec();
    trace.hidden_size = hidden;
    for position in positions {
        let vectors = by_position
            .get(position)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let Some((embedding, layers)) = vectors.split_first() else {
            continue;
        };
        trace.embedding.extend_from_slice(embedding);
        let (layers, _) = layers.as_chunks::<2>();
        trace.layers.resize_with(layers.len(), LayerTrace::default);
        let mut before = embedding;
        for (layer, [between, after]) in trace.layers.iter_mut().zip(layers) {
            layer.mixer.extend(difference(between, before));
            layer.feed_forward.extend(difference(after, between));
            layer.residual.extend_from_slice(after);
            before = after;
        }
    }
    Ok(trace)
}

fn difference<'a>(a: &'a [f32], b: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    a.iter().zip(b).map(|(a, b)| a - b)
}

/// Returns the attention weights of a prompt's last token. Applies `steering`, if there is any.
///
/// # Errors
/// If a layer is unknown or has no attention, memory runs out, the model is closed, or the caller
/// interrupts.
pub fn attention_weights(
    engine: &Engine,
    (prompt, steering): (&Prompt, Option<&Steering>),
    layers: Option<&[usize]>,
    interrupt: &Interrupt,
) -> Result<AttentionWeights> {
    let tokens = engine.encode_prompt(prompt)?;
    engine.check_prompt(&tokens)?;
    let count = engine.info().num_layers;
    if let Some(layer) = layers.unwrap_or_default().iter().find(|l| **l >= count) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "layer {layer} is beyond the last of {count} layers, which is {}",
                count - 1
            ),
        ));
    }
    let decoder = engine.decoder()?;
    let of = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    let mut attention_weights = AttentionWeights::default();
    engine.scope(|| {
        let mut caches = of.decoder.new_caches(&WHOLE).for_sequence(tokens.len());
        let mut edits = edits_of((engine, of.decoder), steering, tokens.len(), interrupt)?;
        let mut left = tokens.len();
        run(of, &tokens, &mut caches, &mut |part, forward| {
            left -= part.len();
            if left > 0 {
                let out = forward(watch(&mut edits).instead_of_logits());
                return out
                    .and_then(|out| out.eval())
                    .map_err(engine_error("attention weights"));
            }
            let mut seen = Vec::new();
            let mut saw = |layer: usize, weights: &Array| {
                if layers.is_none_or(|layers| layers.contains(&layer)) {
                    seen.push((layer, weights.astype(Dtype::Float32)?));
                }
                Ok(())
            };
            let watch = Watch::weights(&mut saw).edited(hook(&mut edits));
            let out =
                forward(watch.instead_of_logits()).map_err(engine_error("attention weights"))?;
            eval(seen.iter().map(|(_, w)| w).chain([&out]))
                .map_err(engine_error("attention weights"))?;
            for (layer, weights) in seen {
                let values = weights
                    .to_vec::<f32>()
                    .map_err(engine_error("attention weights"))?;
                let heads = values.chunks_exact(tokens.len()).map(<[f32]>::to_vec);
                attention_weights.layers.push(layer);
                attention_weights.weights.push(heads.collect());
            }
            Ok(())
        })
    })?;
    if attention_weights.layers.is_empty() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} has no attention there: its recurrent layers keep a state instead of keys",
                engine.info().architecture
            ),
        ));
    }
    attention_weights.tokens = tokens;
    Ok(attention_weights)
}
