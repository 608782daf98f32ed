//! Gemma 4, text only (Gemma Team 2026; reference: `modeling_gemma4` of Hugging Face transformers).
//! Differences from Gemma 3:
//! - Full layers have a separate head size, rotate only a part of each head, and may use keys as
//!   values.
//! - The last layers use the keys of earlier layers.
//! - Small models have an additional input for each layer.
//! - Large models have a mixture of experts in parallel with the feed-forward part.

use std::collections::BTreeMap;
use std::sync::Arc;

use inference::{Hook, LayerHooks, Result, StepPart};
use mlx_rs_core::transforms::checkpoint_tree;
use mlx_rs_core::{Array, Error, ErrorKind};

use super::Decoder;
use super::build::{Builder, int, invalid};
use super::build_attention::AttentionParts;
use super::gemma2::cap;
use super::gemma4_keys::{key_sizes, own_layers, values_are_keys};
use super::moe::{ExpertsAt, counts, experts};
use super::stack::Head;
use crate::cache::{CacheOptions, Caches, KvView, Row, lengths, passing};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::exec::ExpertGate as Gate;
use crate::loader::Weights;
use crate::nn::adapter::{self, Scope};
use crate::nn::attention::Positions;
use crate::nn::expert_router::{Router, Weighing};
use crate::nn::feed_forward;
use crate::nn::hooks::Watch;
use crate::nn::norm::apart;
use crate::nn::{Activation, Attention, Embedding, Experts, FeedForward, HeadNorms, Linear, Norm};

/// The mixture of experts of a block, which is computed in parallel with its feed-forward part.
#[derive(Debug)]
struct MixtureBeside {
    router: Router,
    /// The router's norm; its weight is `scale / sqrt(hidden)`.
    router_norm: Norm,
    /// `[experts]`.
    per_expert_scale: Array,
    experts: Experts,
    mlp_out: Norm,
    experts_in: Norm,
    experts_out: Norm,
}

/// The layers that add the per-layer input to a block's output.
#[derive(Debug)]
pub(super) struct LayerInput {
    pub gate: Linear,
    pub projection: Linear,
    pub norm: Norm,
}

#[derive(Debug)]
struct Block {
    attention_in: Norm,
    attention: Attention,
    attention_out: Norm,
    mlp_in: Norm,
    mlp: FeedForward,
    mlp_out: Norm,
    mixture: Option<MixtureBeside>,
    input: Option<LayerInput>,
    /// A factor on the block's output, shape `[1]`.
    scalar: Option<Array>,
}

/// Computes the per-layer inputs of all layers.
#[derive(Debug)]
pub(super) struct LayerInputs {
    table: Embedding,
    table_scale: Array,
    projection: Linear,
    projection_scale: Array,
    norm: Norm,
    /// The factor `1 / sqrt(2)`.
    both_scale: Array,
    /// The width of one layer's input.
    width: i32,
    layers: i32,
}

#[derive(Debug)]
struct Gemma4 {
    embedding: Embedding,
    embedding_scale: Array,
    inputs: Option<LayerInputs>,
    blocks: Vec<Arc<Block>>,
    /// For each block, the index of the block whose keys and values it uses: its own index or an
    /// earlier one.
    source: Vec<usize>,
    norm: Norm,
    head: Head,
}

impl MixtureBeside {
    /// Returns the mixture's output for the residual stream `x`. The mixture applies separate norms
    /// to `x`.
    fn forward(&self, x: &Array) -> mlx_rs_core::Result<Array> {
        let (ids, weights) = self.router.forward(&self.router_norm.forward(x)?)?;
        let weights = weights.multiply(&self.per_expert_scale.take_clamped(&ids, 0)?)?;
        let x = self.experts_in.forward(x)?;
        self.experts_out
            .forward(&self.experts.forward(&x, &ids, &weights)?)
    }
}

/// The inputs of a block besides the residual stream.
struct BlockInputs<'a> {
    /// The per-layer input, `[1, T, width]`.
    layer_input: Option<&'a Array>,
    /// Keys and values of an earlier layer, one view per row; `None` if the block has its own keys.
    views: Option<&'a [KvView]>,
}

impl Block {
    /// Maps `[1, T, hidden]` to `[1, T or rows, hidden]`. Also returns the block's new keys and
    /// values, if it computes any.
    fn forward(
        &self,
        x: &Array,
        block_inputs: &BlockInputs<'_>,
        rows: &mut [Row<'_>],
        (layer, positions): (usize, Positions),
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<(Array, Option<Vec<KvView>>)> {
        let lengths = &lengths(rows);
        let normed = self.attention_in.forward(x)?;
        watch.lap(layer, StepPart::Norm, &[&normed])?;
        let made = match block_inputs.views {
            Some(_) => None,
            None => Some(self.attention.update_kv(&normed, rows, layer)?),
        };
        let views = made.as_deref().or(block_inputs.views).unwrap_or_default();
        let attended = self
            .attention
            .attend(&normed, views, lengths, positions, (layer, watch))?;
        let x = positions.of(x, lengths)?;
        if let Some(gain) = self.mlp.gain() {
            watch.saw_mixed(layer, &x)?;
            return Ok((feed_forward::scaled(&x, gain, &attended)?, made));
        }
        let out = self.attention_out.forward(&attended)?;
        let x = x.add(&watch.states_at(layer, Hook::AttnOut, out)?)?;
        let mut x = watch.states_at(layer, Hook::ResidMid, x)?;
        watch.lap(layer, StepPart::Norm, &[&x])?;
        watch.saw_mixed(layer, &x)?;
        if !self.mlp.is_left_out() {
            if watch.wants_inputs() {
                watch.saw_input(layer, &self.mlp_in.forward(&x)?)?;
            }
            let (input, norm) = apart(watch, layer, Some(&self.mlp_in), &x)?;
            let mut y = if watch.wants(layer, Hook::Neurons) {
                let mut edit = |y: Array| watch.states_at(layer, Hook::Neurons, y);
                self.mlp.forward_edited(norm, &input, &mut edit)?
            } else if watch.wants_activations() && self.mlp.has_activations() {
                let (y, activations) = self.mlp.forward_with_activation(norm, &input)?;
                watch.saw_activations(layer, &activations)?;
                y
            } else {
                self.mlp.forward_from(norm, &input, None)?
            };
            if let Some(mixture) = &self.mixture {
                y = mixture.mlp_out.forward(&y)?.add(&mixture.forward(&x)?)?;
            }
            watch.lap(layer, StepPart::Mlp, &[&y])?;
            let y = self.mlp_out.forward(&y)?;
            x = x.add(&watch.states_at(layer, Hook::MlpOut, y)?)?;
            watch.lap(layer, StepPart::Norm, &[&x])?;
        }
        if let (Some(input), Some(layer_input)) = (&self.input, block_inputs.layer_input) {
            let gate = Activation::GeluTanh.apply(&input.gate.forward(&x)?)?;
            let gated = gate.multiply(&positions.of(layer_input, lengths)?)?;
            x = x.add(&input.norm.forward(&input.projection.forward(&gated)?)?)?;
        }
        let x = match &self.scalar {
            Some(scalar) => x.multiply(scalar)?,
            None => x,
        };
        if self.input.is_some() || self.scalar.is_some() {
            watch.lap(layer, StepPart::Extra, &[&x])?;
        }
        Ok((x, made))
    }

    /// Returns the hooks that the block supports: the states that a caller can edit.
    fn hooks(&self) -> LayerHooks {
        let mut hooks = LayerHooks::default();
        let mlp = self.mlp.current();
        // If a factor replaces the layer, the inner states are not used, so edits would have no
        // effect.
        if mlp.gain().is_some() {
            return hooks;
        }
        let size = |n: i32| n.unsigned_abs() as usize;
        hooks.attn_out = true;
        hooks.resid_mid = true;
        hooks.mlp_out = !mlp.is_left_out();
        // With a mixture, the neurons determine only one of the two summands of the output.
        hooks.neurons = mlp.neurons().filter(|_| self.mixture.is_none());
        hooks.heads = Some((size(self.attention.n_heads), size(self.attention.head_dim)));
        hooks
    }

    /// Runs the block without caches, and recomputes it in the backward pass (gradient
    /// checkpointing). Keys and values of an earlier block are arguments of the recomputed
    /// function. New keys and values are results only if `shares` is set. Gradients flow through
    /// arguments and results, but these stay in memory.
    fn forward_again(
        self: &Arc<Self>,
        x: &Array,
        block_inputs: &BlockInputs<'_>,
        (lengths, shares): (&[i32], bool),
        (layer, positions): (usize, Positions),
        scope: &Scope,
    ) -> mlx_rs_core::Result<(Array, Option<Vec<KvView>>)> {
        let fault = |what: &str| Error::new(ErrorKind::Value, "block", what);
        let (block, lengths) = (Arc::clone(self), lengths.to_vec());
        let (has_layer_input, takes) = (
            block_inputs.layer_input.is_some(),
            block_inputs.views.is_some(),
        );
        let frozen = Scope {
            params: BTreeMap::new(),
            ..scope.clone()
        };
        let mut args = vec![x.clone()];
        args.extend(block_inputs.layer_input.cloned());
        for view in block_inputs.views.unwrap_or_default() {
            args.extend(passing::both(view)?);
        }
        let again = checkpoint_tree(move |params: &BTreeMap<String, Array>, args: &[Array]| {
            let Some((x, rest)) = args.split_first() else {
                return Err(fault("an input is expected"));
            };
            let (layer_input, rest) = rest.split_at(usize::from(has_layer_input).min(rest.len()));
            let views = takes.then(|| passing::views(rest));
            let block_inputs = BlockInputs {
                layer_input: layer_input.first(),
                views: views.as_deref(),
            };
            let scope = Scope {
                params: params.clone(),
                ..frozen.clone()
            };
            let mut caches = passing::caches(lengths.len(), layer + 1);
            let mut rows = passing::rows(&lengths, &mut caches);
            let (at, unwatched) = ((layer, positions), &mut Watch::nothing());
            let run = || block.forward(x, &block_inputs, &mut rows, at, unwatched);
            let (x, made) = adapter::within(Arc::new(scope), run)?;
            let mut results = vec![x];
            for view in made.iter().flatten().filter(|_| shares) {
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

impl LayerInputs {
    /// Returns the per-layer inputs `[B, L, layers, width]` for ids `[B, L]` and scaled embeddings
    /// `[B, L, hidden]`.
    pub fn forward(&self, ids: &Array, x: &Array) -> mlx_rs_core::Result<Array> {
        let (batch, length) = (x.dim(0)?, x.dim(1)?);
        let shape = [batch, length, self.layers, self.width];
        let embedded = self.table.forward(ids)?.multiply(&self.table_scale)?;
        let projected = self
            .projection
            .forward(x)?
            .multiply(&self.projection_scale)?
            .reshape(&shape)?;
        self.norm
            .forward(&projected)?
            .add(&embedded.reshape(&shape)?)?
            .multiply(&self.both_scale)
    }
}

impl Decoder for Gemma4 {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        let lengths = lengths(rows);
        let mut x = self
            .embedding
            .forward(ids)?
            .multiply(&self.embedding_scale)?;
        let inputs = self
            .inputs
            .as_ref()
            .map(|i| i.forward(ids, &x))
            .transpose()?;
        watch.begin(rows);
        let made: Vec<&Array> = inputs.iter().chain([&x]).collect();
        watch.lap(None, StepPart::Embedding, &made)?;
        watch.saw_embedding(&x)?;
        let last = self.blocks.len().saturating_sub(1);
        let again = adapter::scope().filter(|scope| scope.checkpoint);
        let mut views: Vec<Vec<KvView>> = Vec::with_capacity(self.blocks.len());
        for (i, block) in self.blocks.iter().enumerate() {
            let keep = if i == last { positions } else { Positions::All };
            x = watch.states_at(i, Hook::ResidPre, x)?;
            let layer_input = inputs
                .as_ref()
                .map(|all| {
                    let at = i32::try_from(i).unwrap_or(i32::MAX);
                    all.slice_axis(2, at, at + 1)?.squeeze_axis(2)
                })
                .transpose()?;
            let source = self.source[i];
            let block_inputs = BlockInputs {
                layer_input: layer_input.as_ref(),
                views: (source != i).then(|| views[source].as_slice()),
            };
            let (out, made) = match &again {
                Some(scope) => {
                    let shares = self.source[i + 1..].contains(&i);
                    block.forward_again(&x, &block_inputs, (&lengths, shares), (i, keep), scope)?
                }
                None => block.forward(&x, &block_inputs, rows, (i, keep), watch)?,
            };
            x = watch.states_at(i, Hook::ResidPost, out)?;
            views.extend(made);
            watch.saw_block(i, &x)?;
        }
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

    fn greatest_logits(&self, x: &Array, k: usize) -> mlx_rs_core::Result<Option<(Array, Array)>> {
        let x = self.norm.forward(x)?;
        self.head.greatest(&x, &self.embedding, k)
    }

    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        Some(self.blocks.iter().map(|block| block.hooks()).collect())
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

    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        let block = self.blocks.get(layer)?;
        block.mixture.is_none().then_some(&block.mlp)
    }

    fn feed_forward_mut(&mut self, layer: usize) -> Option<&mut FeedForward> {
        let block = Arc::get_mut(self.blocks.get_mut(layer)?)?;
        block.mixture.is_none().then_some(&mut block.mlp)
    }

    fn keys_of(&self, layer: usize) -> usize {
        self.source.get(layer).copied().unwrap_or(layer)
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        // Layers that share keys do not have a separate cache.
        let layers = || self.blocks.iter().map(|b| &b.attention);
        let with_keys = layers().filter(|layer| layer.k_proj.is_some());
        let caches: Caches = with_keys.map(|layer| options.cache(layer.window)).collect();
        caches.with_switches(layers().filter_map(Attention::switch))
    }
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let layers = config.num_hidden_layers;
    let with_keys = own_layers(config)?;
    let source = sources(config, with_keys)?;
    let mut b = Builder::new(config, weights)?;
    let activation = b.activation(Activation::GeluTanh)?;
    let width = config
        .uint("hidden_size_per_layer_input", 0..=limits::HIDDEN)?
        .unwrap_or(0);
    let width = int("hidden_size_per_layer_input", width)?;
    let double = config.flag("use_double_wide_mlp")?.unwrap_or(false);
    let blocks = (0..layers)
        .map(|i| {
            let prefix = format!("model.layers.{i}");
            let mlp_width = if double && i >= with_keys {
                b.dims.intermediate.saturating_mul(2)
            } else {
                b.dims.intermediate
            };
            let attention = attention(&mut b, i, i < with_keys)?;
            let mlp = b.gated_mlp(&format!("{prefix}.mlp"), mlp_width, activation, false)?;
            let mixture = if config.flag("enable_moe_block")?.unwrap_or(false) {
                Some(mixture(&mut b, &prefix, activation)?)
            } else {
                None
            };
            let input = if width > 0 {
                let hidden = b.dims.hidden;
                let name = |part: &str| format!("{prefix}.{part}");
                Some(LayerInput {
                    gate: b.linear(&name("per_layer_input_gate"), hidden, width, false)?,
                    projection: b.linear(&name("per_layer_projection"), width, hidden, false)?,
                    norm: b.hidden_norm(&name("post_per_layer_input_norm"))?,
                })
            } else {
                None
            };
            let scalar = format!("{prefix}.layer_scalar");
            let scalar = if b.weights.contains(&scalar) {
                Some(b.weights.vector(&scalar, 1)?)
            } else {
                None
            };
            let mut norm = |part: &str| b.hidden_norm(&format!("{prefix}.{part}"));
            Ok(Arc::new(Block {
                attention_in: norm("input_layernorm")?,
                attention,
                attention_out: norm("post_attention_layernorm")?,
                mlp_in: norm("pre_feedforward_layernorm")?,
                mlp: FeedForward::Gated(mlp),
                mlp_out: norm("post_feedforward_layernorm")?,
                mixture,
                input,
                scalar,
            }))
        })
        .collect::<Result<Vec<_>>>()?;
    let inputs = if width > 0 {
        Some(layer_inputs(&mut b, width)?)
    } else {
        None
    };
    let mut head = b.head(Some(true))?;
    head.softcap = cap(config, "final_logit_softcapping")?
        .map(|c| b.scalar(c))
        .transpose()?;
    let scale = (b.dims.hidden as f32).sqrt();
    Ok(Box::new(Gemma4 {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: b.scalar(scale)?,
        inputs,
        blocks,
        source,
        norm: b.hidden_norm("model.norm")?,
        head,
    }))
}

/// Returns for each layer the index of the layer whose keys it uses. The first `with_keys` layers
/// use their own keys. Every other layer uses the keys of the last of these that has the same kind
/// (sliding or full).
pub(super) fn sources(config: &ModelConfig, with_keys: usize) -> Result<Vec<usize>> {
    (0..config.num_hidden_layers)
        .map(|i| {
            if i < with_keys {
                return Ok(i);
            }
            (0..with_keys)
                .rev()
                .find(|&j| config.slides(j) == config.slides(i))
                .ok_or_else(|| {
                    invalid(format!(
                        "num_kv_shared_layers leaves layer {i} without an earlier layer of its kind"
                    ))
                })
        })
        .collect()
}

pub(super) fn attention(b: &mut Builder<'_>, layer: usize, own_keys: bool) -> Result<Attention> {
    let (dims, values_are_keys) = (b.dims, values_are_keys(b.config, layer)?);
    let (heads, head_dim) = key_sizes(b.config, layer)?;
    if let Some(head_dim) = head_dim {
        b.dims.head_dim = int("head_dim", head_dim as usize)?;
    }
    if let Some(heads) = heads {
        b.dims.n_kv_heads = b.part_of("the number of key heads of a layer", heads as usize)?;
    }
    if b.dims.head_dim % 2 != 0 {
        return Err(invalid(format!(
            "the heads of layer {layer} have {} elements; it must be even",
            b.dims.head_dim
        )));
    }
    let made = attention_of(b, layer, own_keys, values_are_keys);
    b.dims = dims;
    made
}

fn attention_of(
    b: &mut Builder<'_>,
    layer: usize,
    own_keys: bool,
    values_are_keys: bool,
) -> Result<Attention> {
    let at = format!("model.layers.{layer}.self_attn");
    let dims = b.dims;
    if dims.n_heads % dims.n_kv_heads != 0 {
        return Err(invalid(format!(
            "{} key heads do not divide {} query heads in layer {layer}",
            dims.n_kv_heads, dims.n_heads
        )));
    }
    let (q_dim, kv_dim) = (
        dims.n_heads * dims.head_dim,
        dims.n_kv_heads * dims.head_dim,
    );
    let name = |part: &str| format!("{at}.{part}");
    let bias = b.config.attention_bias;
    let rope = b.rope(layer, dims.head_dim, AttentionParts::default().traditional)?;
    let q_norm = b.norm(&name("q_norm"), dims.head_dim)?;
    let (mut k_proj, mut v_proj, mut k_norm) = (None, None, None);
    if own_keys {
        k_proj = Some(b.linear(&name("k_proj"), dims.hidden, kv_dim, bias)?);
        if !values_are_keys {
            v_proj = Some(b.linear(&name("v_proj"), dims.hidden, kv_dim, bias)?);
        }
        k_norm = Some(b.norm(&name("k_norm"), dims.head_dim)?);
    } else {
        // Checkpoints contain these tensors, although the layer uses the keys of another layer.
        for part in ["k_proj", "v_proj", "k_norm", "v_norm"] {
            b.weights.ignore(&name(part));
        }
    }
    Ok(Attention {
        q_proj: b.linear(&name("q_proj"), dims.hidden, q_dim, bias)?,
        k_proj,
        v_proj,
        o_proj: b.linear(&name("o_proj"), q_dim, dims.hidden, bias)?,
        norms: HeadNorms {
            q: Some(q_norm),
            k: k_norm,
            v: Some(Norm::Rms {
                weight: None,
                eps: dims.eps,
            }),
            across_heads: false,
            after_rotation: false,
        },
        rope: Some(rope),
        n_heads: dims.n_heads,
        n_kv_heads: dims.n_kv_heads,
        head_dim: dims.head_dim,
        scale: 1.0,
        window: b.window(layer)?,
        softcap: None,
        growth: None,
        clip: None,
        chunk: None,
        sinks: None,
        sums: b.weights.attention_sums(),
    })
}

fn mixture(b: &mut Builder<'_>, prefix: &str, activation: Activation) -> Result<MixtureBeside> {
    let (count, per_token) = counts(b.config, "top_k_experts")?;
    let hidden = b.dims.hidden;
    let width = b
        .config
        .required_uint("moe_intermediate_size", 1..=limits::INTERMEDIATE)?;
    let width = b.part_of("moe_intermediate_size", width)?;
    let name = |part: &str| format!("{prefix}.{part}");
    let root = b.scalar((hidden as f32).powf(-0.5))?;
    let router_norm = Norm::Rms {
        weight: Some(
            b.weights
                .vector(&name("router.scale"), hidden)?
                .multiply(&root)
                .map_err(engine("weights"))?,
        ),
        eps: b.dims.eps,
    };
    let at = ExpertsAt {
        stacked: name("experts.switch_glu"),
        single: name("experts"),
        parts: ["gate_proj", "up_proj", "down_proj"],
    };
    Ok(MixtureBeside {
        router: Router {
            linear: b.linear(&name("router.proj"), hidden, count, false)?,
            per_token,
            weighing: Weighing::SoftmaxOfChosen,
            choice_bias: None,
            groups: None,
            logit_cap: None,
        },
        router_norm,
        per_expert_scale: b.weights.vector(&name("router.per_expert_scale"), count)?,
        experts: experts(b, &at, count, width, Gate::Plain(activation))?,
        mlp_out: b.hidden_norm(&name("post_feedforward_layernorm_1"))?,
        experts_in: b.hidden_norm(&name("pre_feedforward_layernorm_2"))?,
        experts_out: b.hidden_norm(&name("post_feedforward_layernorm_2"))?,
    })
}

pub(super) fn layer_inputs(b: &mut Builder<'_>, width: i32) -> Result<LayerInputs> {
    let config = b.config;
    let layers = int("num_hidden_layers", config.num_hidden_layers)?;
    let rows = config
        .uint("vocab_size_per_layer_input", 1..=limits::VOCAB)?
        .unwrap_or(config.vocab_size);
    let rows = int("vocab_size_per_layer_input", rows)?;
    let all = layers
        .checked_mul(width)
        .ok_or_else(|| invalid("hidden_size_per_layer_input is too large"))?;
    let hidden = b.dims.hidden;
    Ok(LayerInputs {
        table: b
            .weights
            .embedding("model.embed_tokens_per_layer", rows, all)?,
        table_scale: b.scalar((width as f32).sqrt())?,
        projection: b.linear("model.per_layer_model_projection", hidden, all, false)?,
        projection_scale: b.scalar((hidden as f32).powf(-0.5))?,
        norm: b.norm("model.per_layer_projection_norm", width)?,
        both_scale: b.scalar(std::f32::consts::FRAC_1_SQRT_2)?,
        width,
        layers,
    })
}
