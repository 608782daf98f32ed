//! Inspects a model: attention, hidden states, pooled states, and log-probabilities of a text.

mod feed_forward;
mod profile;
mod trace;
mod weights;

use std::collections::BTreeMap;

use inference::{
    AttentionSnapshot, Error, ErrorKind, GenerateOptions, HiddenStates, Interrupt, Pooling, Prompt,
    Result, Steering,
};
use mlx_rs_core::{Array, Dtype, concatenate, eval};

use crate::arch::Decoder;
use crate::cache::{CacheOptions, Caches, Row};
use crate::engine::Engine;
use crate::engine::forward::ids;
use crate::error::engine as engine_error;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::sentence::pooled;
use crate::steer::{edits_of, watch};

pub use feed_forward::{
    activations as feed_forward_activations, features_of, inputs as feed_forward_inputs,
    weights as feed_forward_weights,
};
pub use profile::profile_steps;
pub use trace::{attention_weights, residuals};
pub use weights::{attention_projections, token_embeddings, token_scores};

/// Options for caches that keep all positions unquantized, so that memory options do not change the
/// results of an inspection.
const WHOLE: CacheOptions = CacheOptions {
    bound: None,
    packing: None,
    half: false,
    trimmable: Some(CacheOptions::ALL),
};

/// The number of hidden states whose logits are computed at a time.
const UNEMBEDDED: usize = 64;

/// The number of positions in one forward pass.
fn step() -> usize {
    GenerateOptions::default().prefill.prefill_step_size
}

/// Runs the forward pass of one step, with observers.
type Forward<'a> = dyn FnMut(Watch<'_>) -> mlx_rs_core::Result<Array> + 'a;

/// The inputs of one run: the engine, its decoder, and the caller's handle for cancellation.
#[derive(Clone, Copy)]
struct Run<'a> {
    engine: &'a Engine,
    decoder: &'a dyn Decoder,
    interrupt: &'a Interrupt,
}

impl Run<'_> {
    /// Returns an error if the run must not continue.
    fn check(&self) -> Result<()> {
        self.engine.check_open()?;
        self.interrupt.check()
    }
}

/// Runs a prompt in steps. `f` receives the tokens of each step and a function for its forward
/// pass.
fn run(
    run: Run<'_>,
    tokens: &[u32],
    caches: &mut Caches,
    f: &mut dyn FnMut(&[u32], &mut Forward<'_>) -> Result<()>,
) -> Result<()> {
    for part in tokens.chunks(step()) {
        run.check()?;
        f(part, &mut |mut watch| {
            let ids = ids(part)?;
            let mut rows = [Row {
                length: ids.dim(1)?,
                caches,
            }];
            run.decoder
                .forward(&ids, &mut rows, Positions::All, &mut watch)
        })?;
    }
    Ok(())
}

/// Splits `[1, H, L, D]` into one vector of `L * D` elements per head.
fn heads(array: &Array) -> mlx_rs_core::Result<Vec<Vec<f32>>> {
    let n = array.dim(1)?;
    (0..n)
        .map(|h| array.slice_axis(1, h, h + 1)?.to_f32_vec())
        .collect()
}

/// Returns the keys and queries of a prompt.
///
/// # Errors
/// If memory runs out, the model is closed, or `interrupt` ends the run.
pub fn attention(
    engine: &Engine,
    prompt: &Prompt,
    interrupt: &Interrupt,
) -> Result<AttentionSnapshot> {
    let tokens = engine.encode_prompt(prompt)?;
    engine.check_prompt(&tokens)?;
    let decoder = engine.decoder()?;
    let info = engine.info();
    let states = decoder.new_caches(&WHOLE);
    if states.iter().all(|state| state.as_kv().is_none()) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} has no attention to look at; its layers are recurrent",
                info.architecture
            ),
        ));
    }
    engine.scope(|| {
        let mut caches = decoder.new_caches(&WHOLE).for_sequence(tokens.len());
        let mut queries: BTreeMap<usize, Vec<Array>> = BTreeMap::new();
        run(
            Run {
                engine,
                decoder: decoder.as_ref(),
                interrupt,
            },
            &tokens,
            &mut caches,
            &mut |_, forward| {
                let mut seen = Vec::new();
                let mut saw = |layer: usize, q: &Array| {
                    seen.push((layer, q.clone()));
                    Ok(())
                };
                let out = forward(Watch::queries(&mut saw).instead_of_logits())
                    .map_err(engine_error("inspect"))?;
                eval(seen.iter().map(|(_, q)| q).chain([&out])).map_err(engine_error("inspect"))?;
                for (layer, q) in seen {
                    queries.entry(layer).or_default().push(q);
                }
                Ok(())
            },
        )?;
        let fault = engine_error("inspect");
        let queries = (0..info.num_layers)
            .map(|layer| match queries.get(&layer) {
                Some(parts) => heads(&concatenate(&parts.iter().collect::<Vec<_>>(), 2)?),
                None => Ok(Vec::new()),
            })
            .collect::<mlx_rs_core::Result<Vec<_>>>()
            .map_err(&fault)?;
        let by_cache = caches
            .iter()
            .map(|cache| {
                let stored = match cache.as_kv() {
                    Some(keys) => Some(keys.snapshot()?),
                    None => None,
                };
                match stored.as_ref().and_then(|stored| stored.arrays.get("keys")) {
                    Some(keys) => heads(keys),
                    None => Ok(Vec::new()),
                }
            })
            .collect::<mlx_rs_core::Result<Vec<_>>>()
            .map_err(&fault)?;
        let keys = (0..info.num_layers)
            .filter_map(|layer| by_cache.get(decoder.keys_of(layer)).cloned())
            .collect();
        let mut snapshot = AttentionSnapshot::default();
        snapshot.architecture = info.architecture.clone();
        snapshot.num_layers = info.num_layers;
        snapshot.num_heads = info.num_heads;
        snapshot.num_kv_heads = info.num_kv_heads;
        snapshot.seq_len = tokens.len();
        snapshot.head_dim = info.head_dim;
        snapshot.keys = keys;
        snapshot.queries = Some(queries);
        Ok(snapshot)
    })
}

/// Runs a forward pass and returns the hidden states at its positions `local`: the embedding, then
/// each block's output. Each list has one vector of `hidden` elements per position.
fn watched(local: &[u32], forward: &mut Forward<'_>) -> Result<Vec<Vec<f32>>> {
    let mut seen = Vec::new();
    let mut saw = |_: usize, x: &Array| {
        if !local.is_empty() {
            seen.push(x.take_ids(local, 1)?.astype(Dtype::Float32)?);
        }
        Ok(())
    };
    let out =
        forward(Watch::states(&mut saw).instead_of_logits()).map_err(engine_error("inspect"))?;
    eval(seen.iter().chain([&out])).map_err(engine_error("inspect"))?;
    seen.iter()
        .map(|states| states.to_vec::<f32>().map_err(engine_error("inspect")))
        .collect()
}

/// Checks that every position is less than `length`.
fn check_positions(positions: &[usize], length: usize) -> Result<()> {
    match positions.iter().find(|&&p| p >= length) {
        None => Ok(()),
        Some(p) => Err(Error::new(
            ErrorKind::InvalidOption,
            format!("position {p} is beyond the prompt of {length} tokens"),
        )),
    }
}

/// Converts positions to `u32` indices of an axis.
fn local(positions: impl Iterator<Item = usize>) -> Vec<u32> {
    positions
        .map(|p| u32::try_from(p).unwrap_or(u32::MAX))
        .collect()
}

/// Selects the `positions` in a step of `len` positions that begins at position `before`. Returns
/// the selected positions, and their indices in the step.
fn wanted_in(positions: &[usize], before: usize, len: usize) -> (Vec<usize>, Vec<u32>) {
    let wanted: Vec<usize> = (before..before + len)
        .filter(|p| positions.contains(p))
        .collect();
    let at = local(wanted.iter().map(|p| p - before));
    (wanted, at)
}

/// Returns the hidden states of one prompt at `positions`, computed in steps.
fn states_in_steps(
    of: Run<'_>,
    tokens: &[u32],
    positions: &[usize],
    hidden: usize,
) -> Result<Vec<Vec<f32>>> {
    let mut caches = of.decoder.new_caches(&WHOLE).for_sequence(tokens.len());
    // Maps a requested position to one vector per hidden state.
    let mut by_position: BTreeMap<usize, Vec<Vec<f32>>> = BTreeMap::new();
    let mut before = 0;
    let mut count = 0;
    run(of, tokens, &mut caches, &mut |part, forward| {
        let (wanted, at) = wanted_in(positions, before, part.len());
        let states = watched(&at, forward)?;
        count = count.max(states.len());
        for state in states {
            for (p, vector) in wanted.iter().zip(state.chunks_exact(hidden)) {
                by_position.entry(*p).or_default().push(vector.to_vec());
            }
        }
        before += part.len();
        Ok(())
    })?;
    Ok((0..count)
        .map(|state| {
            let at = |p: &usize| by_position.get(p).and_then(|all| all.get(state));
            positions.iter().filter_map(at).flatten().copied().collect()
        })
        .collect())
}

/// Returns the hidden states of several short prompts, computed in one pass.
fn states_together(
    of: Run<'_>,
    prompts: &[(Vec<u32>, &[usize])],
    hidden: usize,
) -> Result<Vec<Vec<Vec<f32>>>> {
    let all: Vec<u32> = prompts
        .iter()
        .flat_map(|(tokens, _)| tokens.iter().copied())
        .collect();
    let mut caches: Vec<Caches> = prompts
        .iter()
        .map(|(tokens, _)| of.decoder.new_caches(&WHOLE).for_sequence(tokens.len()))
        .collect();
    let mut rows: Vec<Row<'_>> = caches
        .iter_mut()
        .zip(prompts)
        .map(|(caches, (tokens, _))| Row {
            length: i32::try_from(tokens.len()).unwrap_or(i32::MAX),
            caches,
        })
        .collect();
    let mut before = 0;
    let mut wanted = Vec::new();
    for (tokens, positions) in prompts {
        wanted.extend(positions.iter().map(|p| p + before));
        before += tokens.len();
    }
    let states = watched(&local(wanted.into_iter()), &mut |mut watch| {
        of.decoder
            .forward(&ids(&all)?, &mut rows, Positions::All, &mut watch)
    })?;
    let mut from = 0;
    Ok(prompts
        .iter()
        .map(|(_, positions)| {
            let to = from + positions.len() * hidden;
            let of_prompt = states
                .iter()
                .map(|state| state[from..to].to_vec())
                .collect();
            from = to;
            of_prompt
        })
        .collect())
}

/// Returns the embedding and the outputs of all blocks, at some positions of each prompt.
///
/// # Errors
/// If a position is outside its prompt, memory runs out, the model is closed, or the caller
/// interrupts.
pub fn hidden_states(
    engine: &Engine,
    prompts: &[Prompt],
    positions: &[Vec<usize>],
    interrupt: &Interrupt,
) -> Result<Vec<HiddenStates>> {
    if prompts.len() != positions.len() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{} prompts and positions for {}",
                prompts.len(),
                positions.len()
            ),
        ));
    }
    let mut encoded = Vec::with_capacity(prompts.len());
    for (prompt, positions) in prompts.iter().zip(positions) {
        let tokens = engine.encode_prompt(prompt)?;
        engine.check_prompt(&tokens)?;
        check_positions(positions, tokens.len())?;
        encoded.push((tokens, positions.as_slice()));
    }
    let decoder = engine.decoder()?;
    let hidden = engine.info().hidden_size;
    let of = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    engine.scope(|| {
        let mut all = Vec::with_capacity(encoded.len());
        let mut rest = encoded.as_slice();
        while !rest.is_empty() {
            of.check()?;
            let n = fit_in_a_step(rest.iter().map(|(tokens, _)| tokens.len()));
            let (now, later) = rest.split_at(n);
            let states = match now {
                [(tokens, positions)] => vec![states_in_steps(of, tokens, positions, hidden)?],
                _ => states_together(of, now, hidden)?,
            };
            for ((tokens, positions), states) in now.iter().zip(states) {
                let mut prompt_states = HiddenStates::default();
                prompt_states.tokens.clone_from(tokens);
                prompt_states.positions = positions.to_vec();
                prompt_states.hidden_size = hidden;
                let mut states = states.into_iter();
                prompt_states.embedding = states.next().unwrap_or_default();
                prompt_states.blocks = states.collect();
                all.push(prompt_states);
            }
            rest = later;
        }
        Ok(all)
    })
}

/// Returns how many prompts with these lengths fit one forward pass; at least one.
fn fit_in_a_step(lengths: impl Iterator<Item = usize>) -> usize {
    let mut total = 0;
    lengths
        .take_while(|length| {
            total += length;
            total <= step()
        })
        .count()
        .max(1)
}

/// Returns the logits of hidden states. `states` is `[states, hidden]`, row-major.
///
/// # Errors
/// If the length of `states` is not a multiple of the hidden size. Also if memory runs out, or the
/// model is closed.
pub fn unembed(engine: &Engine, states: &[f32]) -> Result<Vec<Vec<f32>>> {
    let hidden = engine.info().hidden_size;
    if hidden == 0 || !states.len().is_multiple_of(hidden) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{} numbers are not a whole number of hidden states of {hidden} elements",
                states.len()
            ),
        ));
    }
    let decoder = engine.decoder()?;
    let fault = engine_error("unembed");
    engine.scope(|| {
        // The logits of all states would need too much memory, so they are computed in chunks.
        let mut all = Vec::with_capacity(states.len() / hidden);
        for part in states.chunks(hidden * UNEMBEDDED) {
            engine.check_open()?;
            let width = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
            let shape = [1, width(part.len() / hidden), width(hidden)];
            let logits = Array::from_slice(part, &shape)
                .and_then(|x| decoder.unembed(&x)?.astype(Dtype::Float32)?.to_vec::<f32>())
                .map_err(&fault)?;
            let vocab = logits.len() / (part.len() / hidden);
            all.extend(logits.chunks_exact(vocab).map(<[f32]>::to_vec));
        }
        Ok(all)
    })
}

/// Returns the pooled hidden states of prompts, before the layers that follow pooling.
///
/// # Errors
/// If memory runs out, the model is closed, or `interrupt` ends the run.
pub fn pooled_states(
    engine: &Engine,
    prompts: &[Vec<u32>],
    pooling: Pooling,
    interrupt: &Interrupt,
) -> Result<Vec<Vec<f32>>> {
    let decoder = engine.decoder()?;
    let hidden = engine.info().hidden_size;
    let run = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    // Prompts of similar length are computed together. The vectors are returned in the original
    // order.
    let mut order: Vec<usize> = (0..prompts.len()).collect();
    order.sort_by_key(|i| prompts[*i].len());
    let mut vectors = vec![Vec::new(); prompts.len()];
    engine.scope(|| {
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            run.check()?;
            let n = fit_in_a_step(rest.iter().map(|i| prompts[*i].len()));
            let (now, later) = rest.split_at(n);
            let tokens: Vec<&[u32]> = now.iter().map(|i| prompts[*i].as_slice()).collect();
            let states = last_states(run, &tokens)?;
            let mut from = 0;
            for (i, tokens) in now.iter().zip(tokens) {
                let to = from + tokens.len() * hidden;
                let vector = states.get(from..to).unwrap_or_default();
                vectors[*i] = pooled(vector, hidden, pooling);
                from = to;
            }
            rest = later;
        }
        Ok(vectors)
    })
}

/// Returns the last hidden states of `prompts`, concatenated. Several short prompts share one pass;
/// one long prompt is computed in steps.
fn last_states(of: Run<'_>, prompts: &[&[u32]]) -> Result<Vec<f32>> {
    let Run {
        engine, decoder, ..
    } = of;
    let fault = engine_error("embed");
    let states = if let [tokens] = prompts {
        let caches = decoder.new_caches(engine.cache_options());
        let mut caches = caches.for_sequence(tokens.len());
        let mut parts = Vec::new();
        run(of, tokens, &mut caches, &mut |_, forward| {
            let part = forward(Watch::nothing().instead_of_logits())
                .and_then(|part| eval([&part]).map(|()| part))
                .map_err(engine_error("embed"))?;
            parts.push(part);
            Ok(())
        })?;
        concatenate(&parts.iter().collect::<Vec<_>>(), 1).map_err(&fault)?
    } else {
        let all = prompts.concat();
        let mut caches: Vec<Caches> = prompts
            .iter()
            .map(|_| decoder.new_caches(engine.cache_options()))
            .collect();
        let mut rows: Vec<Row<'_>> = caches
            .iter_mut()
            .zip(prompts)
            .map(|(caches, tokens)| Row {
                length: i32::try_from(tokens.len()).unwrap_or(i32::MAX),
                caches,
            })
            .collect();
        let mut watch = Watch::nothing().instead_of_logits();
        ids(&all)
            .and_then(|ids| decoder.forward(&ids, &mut rows, Positions::All, &mut watch))
            .map_err(&fault)?
    };
    states
        .astype(Dtype::Float32)
        .and_then(|states| states.to_vec::<f32>())
        .map_err(&fault)
}

/// Returns the log-probability of each token of a text, except the first token.
///
/// # Errors
/// If memory runs out, the model is closed, or `interrupt` ends the run.
pub fn token_logprobs(
    engine: &Engine,
    tokens: &[u32],
    steering: Option<&Steering>,
    interrupt: &Interrupt,
) -> Result<Vec<f32>> {
    let decoder = engine.decoder()?;
    engine.scope(|| {
        let fault = engine_error("logprobs");
        let of = (engine, decoder.as_ref());
        let mut edits = edits_of(of, steering, tokens.len(), interrupt)?;
        let caches = decoder.new_caches(engine.cache_options());
        let mut caches = caches.for_sequence(tokens.len());
        let mut logprobs = Vec::with_capacity(tokens.len());
        let mut before = 0;
        run(
            Run {
                engine,
                decoder: decoder.as_ref(),
                interrupt,
            },
            tokens,
            &mut caches,
            &mut |part, forward| {
                let next = &tokens[before + 1..(before + 1 + part.len()).min(tokens.len())];
                before += part.len();
                let logits = forward(watch(&mut edits)).map_err(&fault)?;
                let score = || -> mlx_rs_core::Result<Vec<f32>> {
                    let n = i32::try_from(next.len()).unwrap_or(i32::MAX);
                    // [1, L, V] -> [n, V], for the positions whose next token is known
                    let logits = logits
                        .slice_axis(1, 0, n)?
                        .squeeze_axis(0)?
                        .astype(Dtype::Float32)?;
                    let ids = Array::vector(next)?.expand_dims(1)?;
                    let chosen = logits.take_along_axis(&ids, -1)?;
                    let total = logits.logsumexp(-1, true)?;
                    chosen.subtract(&total)?.to_vec()
                };
                if next.is_empty() {
                    eval([&logits]).map_err(&fault)?;
                } else {
                    logprobs.extend(score().map_err(&fault)?);
                }
                Ok(())
            },
        )?;
        Ok(logprobs)
    })
}
