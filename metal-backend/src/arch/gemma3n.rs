//! Gemma 3n, text only (Gemma Team 2025; reference: `modeling_gemma3n` of Hugging Face
//! transformers). Differences from Gemma 3:
//! - Several residual streams (AltUp, Baykal et al. 2023). A block computes one of them. The others
//!   are predicted before the block and corrected after it.
//! - A low-rank projection in parallel with attention (LAuReL).
//! - In some layers, only the greatest gate values of the feed-forward part are used; the others
//!   are zero.
//! - Additional inputs for each layer, and keys that the last layers share, as in Gemma 4.

use std::collections::BTreeMap;
use std::sync::Arc;

use inference::{Result, StepPart};
use mlx_rs_core::transforms::checkpoint_tree;
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, concatenate, stack, where_};

use super::Decoder;
use super::build::{Builder, int, invalid};
use super::gemma2::cap;
use super::gemma4::{LayerInput, LayerInputs, attention, layer_inputs, sources};
use super::gemma4_keys::own_layers;
use super::stack::Head;
use crate::cache::{CacheOptions, Caches, KvView, Row, lengths, passing};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::adapter::{self, Scope};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::{Activation, Attention, Embedding, GatedMlp, Linear, Norm, Weight};

/// The lower bound of a projected stream's mean square; the stream is divided by the root.
const LEAST: f32 = 1e-5;

/// The layers that predict and correct the residual streams.
#[derive(Debug)]
struct AltUp {
    router_norm: Norm,
    /// `[hidden] -> [streams]`.
    router: Linear,
    router_scale: Array,
    /// `[streams] -> [streams * streams]`.
    prediction: Linear,
    /// `[streams] -> [streams]`.
    correction: Linear,
    /// The factor on the corrected stream from which the gate of the per-layer input is computed;
    /// `None` if not configured.
    scale: Option<Array>,
    streams: i32,
    /// The index of the stream that blocks compute.
    active: i32,
}

impl AltUp {
    /// Returns stream `at` of `[1, T, streams, hidden]`.
    fn stream(all: &Array, at: i32) -> mlx_rs_core::Result<Array> {
        all.slice_axis(2, at, at + 1)?.squeeze_axis(2)
    }

    /// Maps `[1, T, hidden]` to the router's outputs `[1, T, streams]`.
    fn routed(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        let x = self.router_norm.forward(x)?.multiply(&self.router_scale)?;
        let routed = self.router.forward(&x)?.astype(Dtype::Float32)?;
        routed.tanh()?.astype(x.dtype())
    }

    /// Returns the predicted streams, `[1, T, streams, hidden]`.
    fn predict(&self, streams: &Array) -> mlx_rs_core::Result<Array> {
        let routed = self.routed(&Self::stream(streams, self.active)?)?;
        let shape = [1, streams.dim(1)?, self.streams, self.streams];
        let weights = self.prediction.forward(&routed)?.reshape(&shape)?;
        weights.matmul(streams)?.add(streams)
    }

    /// Returns the predictions `[1, T, streams, hidden]`, corrected by the computed stream `[1, T,
    /// hidden]`.
    fn correct(&self, predictions: &Array, computed: &Array) -> mlx_rs_core::Result<Array> {
        let routed = self.correction.forward(&self.routed(computed)?)?;
        let one = Array::scalar(1.0f32)?.astype(routed.dtype())?;
        let weights = routed.add(&one)?.expand_dims(-1)?; // [1, T, streams, 1]
        let error = computed.subtract(&Self::stream(predictions, self.active)?)?;
        error.expand_dims(2)?.multiply(&weights)?.add(predictions)
    }
}

/// A low-rank projection with a residual.
#[derive(Debug)]
struct Laurel {
    down: Linear,
    up: Linear,
    norm: Norm,
}

impl Laurel {
    fn forward(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        let y = self.up.forward(&self.down.forward(x)?)?;
        self.norm.forward(&y)?.add(x)
    }
}

/// A gated feed-forward part. With `deviations`, only its greatest gate values are nonzero.
#[derive(Debug)]
struct SparseMlp {
    mlp: GatedMlp,
    /// The number of standard deviations above the mean that a gate value must exceed; `None` if
    /// all values are used.
    deviations: Option<Array>,
}

impl SparseMlp {
    fn forward(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        let Some(deviations) = &self.deviations else {
            return self.mlp.forward(x);
        };
        let gate = self.mlp.gate.forward(x)?;
        let mean = gate.mean(-1, true)?;
        let spread = gate.subtract(&mean)?.square()?.mean(-1, true)?.sqrt()?;
        let least = mean.add(&spread.multiply(deviations)?)?;
        let gate = Activation::Relu.apply(&gate.subtract(&least)?)?;
        let gate = self.mlp.activation.apply(&gate)?;
        let y = gate.multiply(&self.mlp.up.forward(x)?)?;
        self.mlp.down.forward(&y)
    }
}

#[derive(Debug)]
struct Block {
    altup: AltUp,
    laurel: Laurel,
    attention_in: Norm,
    attention: Attention,
    attention_out: Norm,
    mlp_in: Norm,
    mlp: SparseMlp,
    mlp_out: Norm,
    input: LayerInput,
    /// The factor `1 / sqrt(2)`.
    half: Array,
}

impl Block {
    /// Returns the streams `[1, T, streams, hidden]` after the block. Also returns the block's new
    /// keys and values, if it computes any. Otherwise, `views` contains those of an earlier block.
    fn forward(
        &self,
        streams: &Array,
        (layer_input, views): (&Array, Option<&[KvView]>),
        rows: &mut [Row<'_>],
        layer: usize,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<(Array, Option<Vec<KvView>>)> {
        let lengths = lengths(rows);
        let predictions = self.altup.predict(streams)?;
        let x = AltUp::stream(&predictions, self.altup.active)?;
        let normed = self.attention_in.forward(&x)?;
        let laurel = self.laurel.forward(&normed)?;
        let made = match views {
            Some(_) => None,
            None => Some(self.attention.update_kv(&normed, rows, layer)?),
        };
        let views = made.as_deref().or(views).unwrap_or_default();
        let all = Positions::All;
        let attended = (self.attention).attend(&normed, views, &lengths, all, (layer, watch))?;
        let attended = self.attention_out.forward(&attended)?;
        let x = x.add(&attended)?.add(&laurel)?.multiply(&self.half)?;
        let y = self.mlp.forward(&self.mlp_in.forward(&x)?)?;
        let x = x.add(&self.mlp_out.forward(&y)?)?;
        let corrected = self.altup.correct(&predictions, &x)?;
        let mut first = AltUp::stream(&corrected, self.altup.active)?;
        if let Some(scale) = &self.altup.scale {
            first = first.multiply(scale)?;
        }
        let gate = Activation::GeluTanh.apply(&self.input.gate.forward(&first)?)?;
        let added = self
            .input
            .projection
            .forward(&gate.multiply(layer_input)?)?;
        let added = self.input.norm.forward(&added)?.expand_dims(2)?;
        // All streams except the first receive the per-layer input.
        let head = corrected.slice_axis(2, 0, 1)?;
        let rest = corrected.slice_axis(2, 1, self.altup.streams)?;
        let streams = concatenate(&[&head, &rest.add(&added)?], 2)?;
        Ok((streams, made))
    }

    /// Runs the block without caches, and recomputes it in the backward pass (gradient
    /// checkpointing). Shared keys and values are arguments and results of the recomputed function,
    /// so that gradients flow through them.
    fn forward_again(
        self: &Arc<Self>,
        streams: &Array,
        (layer_input, views): (&Array, Option<&[KvView]>),
        (lengths, layer): (&[i32], usize),
        scope: &Scope,
    ) -> mlx_rs_core::Result<(Array, Option<Vec<KvView>>)> {
        let fault = |what: &str| Error::new(ErrorKind::Value, "block", what);
        let (block, lengths, takes) = (Arc::clone(self), lengths.to_vec(), views.is_some());
        let frozen = Scope {
            params: BTreeMap::new(),
            ..scope.clone()
        };
        let mut args = vec![streams.clone(), layer_input.clone()];
        for view in views.unwrap_or_default() {
            args.extend(passing::both(view)?);
        }
        let again = checkpoint_tree(move |params: &BTreeMap<String, Array>, args: &[Array]| {
            let [streams, layer_input, rest @ ..] = args else {
                return Err(fault("two inputs are expected"));
            };
            let views = takes.then(|| passing::views(rest));
            let scope = Scope {
                params: params.clone(),
                ..frozen.clone()
            };
            let mut caches = passing::caches(lengths.len(), layer + 1);
            let mut rows = passing::rows(&lengths, &mut caches);
            let unwatched = &mut Watch::nothing();
            let inputs = (layer_input, views.as_deref());
            let run = || block.forward(streams, inputs, &mut rows, layer, unwatched);
            let (streams, made) = adapter::within(Arc::new(scope), run)?;
            let mut results = vec![streams];
            for view in made.iter().flatten() {
                results.extend(passing::both(view)?);
            }
            Ok(results)
        });
        let results = again(&scope.of_block(layer), &args)?;
        match results.split_first() {
            Some((x, made)) => Ok((x.clone(), (!takes).then(|| passing::views(made)))),
            None => Err(fault("there is no output")),
        }
    }
}

#[derive(Debug)]
struct Gemma3n {
    embedding: Embedding,
    embedding_scale: Array,
    inputs: LayerInputs,
    /// The number of tokens that have per-layer inputs. Other tokens use those of token 0.
    input_tokens: i32,
    /// The projections from the embedding to all streams except the first.
    spread: Vec<Linear>,
    /// The projections to the output from all streams except the first.
    gather: Vec<Linear>,
    blocks: Vec<Arc<Block>>,
    /// For each block, the index of the block whose keys and values it uses.
    source: Vec<usize>,
    norm: Norm,
    head: Head,
}

/// Returns the root mean square of `x` along the last axis. `least` is a lower bound of the mean
/// square.
fn magnitude(x: &Array, least: Option<f32>) -> mlx_rs_core::Result<Array> {
    let mean = x.square()?.mean(-1, true)?;
    match least {
        Some(least) => mean
            .maximum(&Array::scalar(least)?.astype(x.dtype())?)?
            .sqrt(),
        None => mean.sqrt(),
    }
}

/// Returns `first` and the projections of the streams, scaled to the root mean square of `first`.
fn projected<'a>(
    first: &Array,
    pairs: impl Iterator<Item = (&'a Linear, Array)>,
) -> mlx_rs_core::Result<Vec<Array>> {
    let target = magnitude(first, None)?;
    let mut all = vec![first.clone()];
    for (linear, stream) in pairs {
        let y = linear.forward(&stream)?;
        all.push(y.multiply(&target)?.divide(&magnitude(&y, Some(LEAST))?)?);
    }
    Ok(all)
}

impl Gemma3n {
    /// Combines the streams `[1, T, streams, hidden]` to the input of the last norm, `[1, T,
    /// hidden]`.
    fn gathered(&self, streams: &Array) -> mlx_rs_core::Result<Array> {
        let first = AltUp::stream(streams, 0)?;
        let mut pairs = Vec::with_capacity(self.gather.len());
        for (linear, at) in self.gather.iter().zip(1..) {
            pairs.push((linear, AltUp::stream(streams, at)?));
        }
        let all = projected(&first, pairs.into_iter())?;
        stack(&all.iter().collect::<Vec<_>>(), 0)?.mean(0, false)
    }
}

impl Decoder for Gemma3n {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        let lengths = lengths(rows);
        let x = (self.embedding.forward(ids)?).multiply(&self.embedding_scale)?;
        let known = ids.less(&Array::scalar(self.input_tokens)?.astype(ids.dtype())?)?;
        let inputs = self
            .inputs
            .forward(&where_(&known, ids, &ids.zeros_like()?)?, &x)?;
        watch.begin(rows);
        watch.lap(None, StepPart::Embedding, &[&x, &inputs])?;
        let pairs = self.spread.iter().map(|linear| (linear, x.clone()));
        let streams = projected(&x, pairs)?;
        let mut streams = stack(&streams.iter().collect::<Vec<_>>(), 2)?;
        let looked_at = watch.wants_blocks() || watch.wants_mixed();
        if looked_at {
            watch.saw_embedding(&self.gathered(&streams)?)?;
        }
        let again = adapter::scope().filter(|scope| scope.checkpoint);
        let mut views: Vec<Vec<KvView>> = Vec::with_capacity(self.blocks.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let at = i32::try_from(i).unwrap_or(i32::MAX);
            let layer_input = inputs.slice_axis(2, at, at + 1)?.squeeze_axis(2)?;
            let source = self.source[i];
            let given = (
                &layer_input,
                (source != i).then(|| views[source].as_slice()),
            );
            let (out, made) = match &again {
                Some(scope) => block.forward_again(&streams, given, (&lengths, i), scope)?,
                None => block.forward(&streams, given, rows, i, watch)?,
            };
            streams = out;
            views.extend(made);
            watch.lap(i, StepPart::Mixer, &[&streams])?;
            if looked_at {
                // A block changes all streams together, so there is no separate state after
                // attention.
                let x = self.gathered(&streams)?;
                watch.saw_mixed(i, &x)?;
                watch.saw_block(i, &x)?;
            }
        }
        let x = self.gathered(&positions.of(&streams, &lengths)?)?;
        let x = self.norm.forward(&x)?;
        watch.lap(None, StepPart::Norm, &[&x])?;
        if watch.wants_hidden() {
            return Ok(x);
        }
        let logits = self.head.forward(&x, &self.embedding)?;
        watch.lap(None, StepPart::Head, &[&logits])?;
        Ok(logits)
    }

    fn unembed(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.head.forward(&self.norm.forward(x)?, &self.embedding)
    }

    fn token_vectors(&self, ids: &Array) -> mlx_rs_core::Result<Array> {
        self.embedding.forward(ids)
    }

    fn token_scores(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        self.embedding.as_output(x)
    }

    fn attention(&self, layer: usize) -> Option<&Attention> {
        self.blocks.get(layer).map(|block| &block.attention)
    }

    fn keys_of(&self, layer: usize) -> usize {
        self.source.get(layer).copied().unwrap_or(layer)
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        // Layers that share keys do not have a separate cache.
        let layers = || self.blocks.iter().map(|block| &block.attention);
        let with_keys = layers().filter(|layer| layer.k_proj.is_some());
        let caches: Caches = with_keys.map(|layer| options.cache(layer.window)).collect();
        caches.with_switches(layers().filter_map(Attention::switch))
    }
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let layers = config.num_hidden_layers;
    let with_keys = own_layers(config)?;
    let source = sources(config, with_keys)?;
    let (widths, deviations) = (widths(config)?, deviations(config)?);
    let size = |name: &str, most: usize| int(name, config.required_uint(name, 1..=most)?);
    let width = size("hidden_size_per_layer_input", limits::HIDDEN)?;
    let streams = size("altup_num_inputs", MOST_STREAMS)?;
    let rank = size("laurel_rank", limits::HIDDEN)?;
    let active =
        config.required_uint("altup_active_idx", 0..=streams.unsigned_abs() as usize - 1)?;
    let active = int("altup_active_idx", active)?;
    let input_tokens = size("vocab_size_per_layer_input", limits::VOCAB)?;
    let scaled = config.flag("altup_correct_scale")?.unwrap_or(true);
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::GeluTanh)?;
    let hidden = b.dims.hidden;
    let blocks = (0..layers)
        .map(|i| {
            let at = format!("model.layers.{i}");
            let name = |part: &str| format!("{at}.{part}");
            let attention = attention(&mut b, i, i < with_keys)?;
            let altup = AltUp {
                router_norm: b.hidden_norm(&name("altup.router_norm"))?,
                router: b.linear(&name("altup.modality_router"), hidden, streams, false)?,
                router_scale: b.scalar(1.0 / hidden as f32)?,
                prediction: b.linear(
                    &name("altup.prediction_coefs"),
                    streams,
                    streams * streams,
                    false,
                )?,
                correction: b.linear(&name("altup.correction_coefs"), streams, streams, false)?,
                scale: match scaled {
                    true => Some(
                        b.weights
                            .vector(&name("altup.correct_output_scale"), hidden)?,
                    ),
                    false => {
                        b.weights.ignore(&name("altup.correct_output_scale"));
                        None
                    }
                },
                streams,
                active,
            };
            let laurel = Laurel {
                down: b.linear(&name("laurel.linear_left"), hidden, rank, false)?,
                up: b.linear(&name("laurel.linear_right"), rank, hidden, false)?,
                norm: b.hidden_norm(&name("laurel.post_laurel_norm"))?,
            };
            let input = LayerInput {
                gate: b.linear(&name("per_layer_input_gate"), hidden, width, false)?,
                projection: b.linear(&name("per_layer_projection"), width, hidden, false)?,
                norm: b.hidden_norm(&name("post_per_layer_input_norm"))?,
            };
            let mlp = SparseMlp {
                mlp: b.gated_mlp(&name("mlp"), widths[i], activation, false)?,
                deviations: deviations[i].map(|n| b.scalar(n)).transpose()?,
            };
            Ok(Arc::new(Block {
                altup,
                laurel,
                attention_in: b.hidden_norm(&name("input_layernorm"))?,
                attention,
                attention_out: b.hidden_norm(&name("post_attention_layernorm"))?,
                mlp_in: b.hidden_norm(&name("pre_feedforward_layernorm"))?,
                mlp,
                mlp_out: b.hidden_norm(&name("post_feedforward_layernorm"))?,
                input,
                half: b.scalar(0.5f32.sqrt())?,
            }))
        })
        .collect::<Result<Vec<_>>>()?;
    let (spread, gather) = (
        projections(&mut b, "model.altup_projections", streams)?,
        projections(&mut b, "model.altup_unembed_projections", streams)?,
    );
    let inputs = layer_inputs(&mut b, width)?;
    let mut head = b.head(Some(true))?;
    head.softcap = cap(config, "final_logit_softcapping")?
        .map(|c| b.scalar(c))
        .transpose()?;
    Ok(Box::new(Gemma3n {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: b.scalar((hidden as f32).sqrt())?,
        inputs,
        input_tokens,
        spread,
        gather,
        blocks,
        source,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}

/// Loads a projection for each stream except the first. GGUF files store these as a stack.
fn projections(b: &mut Builder<'_>, at: &str, streams: i32) -> Result<Vec<Linear>> {
    let hidden = b.dims.hidden;
    if !b.weights.contains(&format!("{at}.weight")) {
        return (0..streams - 1)
            .map(|i| b.linear(&format!("{at}.{i}"), hidden, hidden, false))
            .collect();
    }
    let stack = b.weights.stack(at, &[streams - 1, hidden, hidden])?;
    let stack = b.weights.plain(&stack)?;
    (0..streams - 1)
        .map(|i| {
            let matrix = stack.slice_axis(0, i, i + 1);
            let matrix = matrix.and_then(|m| m.squeeze_axis(0)?.contiguous());
            let matrix = matrix.map_err(engine("weights"))?;
            b.weights.layer(Weight::Dense(matrix), None)
        })
        .collect()
}

/// The maximum number of residual streams.
const MOST_STREAMS: usize = 64;

/// Returns the width of each layer's feed-forward part.
fn widths(config: &ModelConfig) -> Result<Vec<i32>> {
    const NAME: &str = "intermediate_sizes";
    let layers = config.num_hidden_layers;
    let all = int("intermediate_size", config.intermediate_size)?;
    let Some(widths) = config.numbers(NAME)? else {
        return Ok(vec![all; layers]);
    };
    let possible = |n: &f32| n.fract() == 0.0 && *n >= 1.0 && *n <= all as f32;
    if widths.len() != layers || !widths.iter().all(possible) {
        return Err(invalid(format!(
            "intermediate_size must be one width, or a list of {layers} widths"
        )));
    }
    Ok(widths.into_iter().map(|n| n as i32).collect())
}

/// Returns for each layer how many standard deviations above the mean a gate value must be; `None`
/// if the layer uses all values.
fn deviations(config: &ModelConfig) -> Result<Vec<Option<f32>>> {
    const NAME: &str = "activation_sparsity_pattern";
    const SCALES: &str = "activation_sparsity_scale";
    let layers = config.num_hidden_layers;
    // GGUF files store the numbers of standard deviations.
    if let Some(scales) = config.fields.get(SCALES).and_then(|v| v.as_array()) {
        if scales.len() != layers {
            return Err(invalid(format!(
                "{SCALES} must be a list of {layers} numbers"
            )));
        }
        return Ok(scales
            .iter()
            .map(|n| n.as_f64().map(|n| n as f32))
            .collect());
    }
    let Some(shares) = config.numbers(NAME)? else {
        return Ok(vec![None; layers]);
    };
    if shares.len() != layers || !shares.iter().all(|share| (0.0..1.0).contains(share)) {
        return Err(invalid(format!(
            "{NAME} must be a list of {layers} numbers from 0 to less than 1"
        )));
    }
    let quantile = |share: f32| -> Result<f32> {
        // The quantile of the normal distribution for the probability `share`.
        let x = Array::scalar(2.0 * share - 1.0);
        let x = x.and_then(|x| x.erfinv()).and_then(|x| x.to_f32_vec());
        let x = x.map_err(engine("weights"))?;
        Ok(x.first().copied().unwrap_or(0.0) * std::f32::consts::SQRT_2)
    };
    (shares.into_iter())
        .map(|share| (share > 0.0).then(|| quantile(share)).transpose())
        .collect()
}
