//! The decoder of almost every architecture: an embedding, blocks, a norm, and a head. A block has
//! a mixer (attention or a recurrent layer) and a feed-forward part, with residuals. The fields
//! determine the factors and the positions of norms. Gemma 4 has another data flow and a separate
//! decoder.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

use inference::{Hook, LayerHooks, StepPart};
use mlx_rs_core::transforms::checkpoint_tree;
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result};

use super::Decoder;
use super::stage::Stage;
use crate::cache::{CacheOptions, Caches, Row, lengths, offset, passing};
use crate::nn::adapter::{self, Scope};
use crate::nn::attention::Positions;
use crate::nn::feed_forward;
use crate::nn::hooks::Watch;
use crate::nn::norm::{apart, through};
use crate::nn::{Attention, Embedding, FeedForward, Fused, Linear, Mixer, Norm};

/// One block. A norm is `None` if the family does not have it.
#[derive(Debug)]
pub struct Block<M: Mixer = Attention> {
    /// The norm before the mixer. In a parallel block without `mlp_in`, the feed-forward part also
    /// uses this norm.
    pub mixer_in: Option<Norm>,
    /// The mixer of positions: attention or a recurrent layer.
    pub mixer: M,
    /// The norm on the mixer's output, before the residual sum.
    pub mixer_out: Option<Norm>,
    /// The norm before the feed-forward part.
    pub mlp_in: Option<Norm>,
    /// The feed-forward part.
    pub mlp: FeedForward,
    /// The norm on the feed-forward output, before the residual sum.
    pub mlp_out: Option<Norm>,
    /// The factor on the outputs of mixer and feed-forward part before the residual sum (Granite).
    pub residual: Option<Array>,
    /// Whether mixer and feed-forward part read the same input, so that their outputs are summed
    /// (Cohere).
    pub parallel: bool,
}

impl<M: Mixer> Block<M> {
    /// Maps `[1, T, hidden]` to `[1, T or rows, hidden]`.
    fn forward(
        &self,
        x: &Array,
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let mixer_in = self.mixer_in.as_ref();
        if let Some(gain) = self.mlp.gain() {
            let input = (x, mixer_in, false);
            let mixed = self.mixer.forward(input, rows, layer, positions, watch)?;
            let x = positions.of(x, &lengths)?;
            watch.saw_mixed(layer, &x)?;
            return feed_forward::scaled(&x, gain, &mixed);
        }
        // Without a norm or factor on its output, the output projection itself can add the residual
        // stream.
        let (mixer_out, add) = (self.mixer_out.as_ref(), self.residual.is_none());
        let add_mixed = add && mixer_out.is_none() && !watch.wants(layer, Hook::AttnOut);
        let mut mixed =
            self.mixer
                .forward((x, mixer_in, add_mixed), rows, layer, positions, watch)?;
        if watch.measures() && self.mixer.as_attention().is_none() {
            let states = rows.iter().filter_map(|row| row.caches.get(layer));
            let states = states.flat_map(|state| state.arrays());
            let made: Vec<&Array> = states.chain([&mixed]).collect();
            watch.lap(layer, StepPart::Mixer, &made)?;
        }
        if !add_mixed {
            let out = watch.states_at(layer, Hook::AttnOut, through(mixer_out, &mixed)?)?;
            mixed = self.add(&positions.of(x, &lengths)?, &out)?;
            watch.lap(layer, StepPart::Norm, &[&mixed])?;
        }
        mixed = watch.states_at(layer, Hook::ResidMid, mixed)?;
        watch.saw_mixed(layer, &mixed)?;
        if self.mlp.is_left_out() {
            return Ok(mixed);
        }
        let (norm, input) = if self.parallel {
            let mlp_in = self.mlp_in.as_ref();
            (mlp_in.or(mixer_in), positions.of(x, &lengths)?)
        } else {
            (self.mlp_in.as_ref(), mixed.clone())
        };
        if watch.wants_inputs() {
            watch.saw_input(layer, &through(norm, &input)?)?;
        }
        let seen = watch.wants_activations() && self.mlp.has_activations();
        if seen || watch.wants(layer, Hook::Neurons) || watch.wants(layer, Hook::MlpOut) {
            let y = if watch.wants(layer, Hook::Neurons) {
                let mut edit = |y: Array| {
                    let y = watch.states_at(layer, Hook::Neurons, y)?;
                    if seen {
                        watch.saw_activations(layer, &y)?;
                    }
                    Ok(y)
                };
                self.mlp.forward_edited(norm, &input, &mut edit)?
            } else if seen {
                let (y, activations) = self.mlp.forward_with_activation(norm, &input)?;
                watch.saw_activations(layer, &activations)?;
                y
            } else {
                self.mlp.forward_from(norm, &input, None)?
            };
            let y = through(self.mlp_out.as_ref(), &y)?;
            return self.add(&mixed, &watch.states_at(layer, Hook::MlpOut, y)?);
        }
        let (input, norm) = apart(watch, layer, norm, &input)?;
        if add && self.mlp_out.is_none() {
            let y = self.mlp.forward_from(norm, &input, Some(&mixed))?;
            watch.lap(layer, StepPart::Mlp, &[&y])?;
            return Ok(y);
        }
        let y = self.mlp.forward_from(norm, &input, None)?;
        watch.lap(layer, StepPart::Mlp, &[&y])?;
        let y = self.add(&mixed, &through(self.mlp_out.as_ref(), &y)?)?;
        watch.lap(layer, StepPart::Norm, &[&y])?;
        Ok(y)
    }

    /// Returns the hooks that the block supports: the states that a caller can edit.
    fn hooks(&self) -> LayerHooks {
        let mlp = self.mlp.current();
        let has_mlp = !matches!(mlp, FeedForward::Nothing) && !mlp.is_left_out();
        let mut hooks = LayerHooks::default();
        // If a factor replaces the layer, the inner states are not used, so edits would have no
        // effect.
        if mlp.gain().is_some() {
            return hooks;
        }
        hooks.attn_out = true;
        hooks.resid_mid = !self.parallel;
        hooks.mlp_out = has_mlp;
        hooks.neurons = mlp.neurons();
        hooks.heads = self.mixer.as_attention().and_then(|attention| {
            let size = |n: i32| usize::try_from(n).ok();
            Some((size(attention.n_heads)?, size(attention.head_dim)?))
        });
        hooks
    }

    /// Returns the block for the fused kernel; `None` if the kernel does not support the block.
    fn fused(&self) -> Option<Fused<'_>> {
        let attention = self.mixer.as_attention()?;
        let plain = attention.clip.is_none()
            && self.mixer_out.is_none()
            && self.mlp_out.is_none()
            && self.residual.is_none()
            && !self.parallel;
        match self.mlp.current() {
            FeedForward::Gated(mlp) if plain => Some(Fused {
                attention_in: self.mixer_in.as_ref(),
                attention,
                mlp_in: self.mlp_in.as_ref(),
                mlp,
            }),
            _ => None,
        }
    }

    /// Runs the block without caches, and recomputes it in the backward pass (gradient
    /// checkpointing).
    fn forward_again(
        self: &Arc<Self>,
        x: &Array,
        lengths: &[i32],
        layer: usize,
        positions: Positions,
        scope: &Scope,
    ) -> Result<Array> {
        let (block, lengths) = (Arc::clone(self), lengths.to_vec());
        let frozen = Scope {
            params: BTreeMap::new(),
            ..scope.clone()
        };
        let again = checkpoint_tree(move |params: &BTreeMap<String, Array>, x: &[Array]| {
            let [x] = x else {
                return Err(Error::new(
                    ErrorKind::Value,
                    "block",
                    "one input is expected",
                ));
            };
            let scope = Scope {
                params: params.clone(),
                ..frozen.clone()
            };
            let mut caches = passing::caches(lengths.len(), layer + 1);
            let mut rows = passing::rows(&lengths, &mut caches);
            let unwatched = &mut Watch::nothing();
            let run = || block.forward(x, &mut rows, layer, positions, unwatched);
            Ok(vec![adapter::within(Arc::new(scope), run)?])
        });
        again(&scope.of_block(layer), std::slice::from_ref(x))?
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Value, "block", "there is no output"))
    }

    fn add(&self, x: &Array, y: &Array) -> Result<Array> {
        match &self.residual {
            Some(factor) => x.add(&y.multiply(factor)?),
            None => x.add(y),
        }
    }
}

impl<M: Mixer> Stack<M> {
    /// Returns the input of the first block, `[1, T, hidden]`, for ids `[1, T]`.
    fn embedded(&self, ids: &Array, rows: &[Row<'_>]) -> Result<Array> {
        let mut x = self.embedding.forward(ids)?; // [1, T] -> [1, T, hidden]
        if let Some(scale) = &self.embedding_scale {
            x = x.multiply(scale)?;
        }
        if let Some(norm) = &self.embedding_norm {
            x = norm.forward(&x)?;
        }
        if let Some(table) = &self.positions {
            let places: Vec<i32> = rows
                .iter()
                .flat_map(|row| (offset(row.caches)..).take(row.length.unsigned_abs() as usize))
                .collect();
            x = x.add(&table.forward(&Array::vector(&places)?)?)?;
        }
        Ok(x)
    }

    /// Returns each block for the fused kernel; `None` if the block cannot be fused in this pass.
    fn fused(
        &self,
        rows: &[Row<'_>],
        positions: Positions,
        watch: &Watch<'_>,
    ) -> Vec<Option<Fused<'_>>> {
        let checkpoint = adapter::scope().is_some_and(|scope| scope.checkpoint);
        let looked_at = watch.wants_attention() || watch.wants_mixed() || watch.measures();
        let none = looked_at || checkpoint;
        // If only the last positions are needed, the last block omits the others, so it is not
        // fused.
        let all = positions == Positions::All || rows.iter().all(|row| row.length == 1);
        let end = self.blocks.len().saturating_sub(usize::from(!all));
        (self.blocks.iter().enumerate())
            .map(|(i, block)| {
                let inside = none || watch.wants_within(i);
                block.fused().filter(|_| i < end && !inside)
            })
            .collect()
    }
}

/// The head, which computes logits from the last block's output.
#[derive(Debug)]
pub struct Head {
    /// The output matrix; `None` if the embedding is the output matrix (tied).
    pub linear: Option<Linear>,
    /// Factor on the logits.
    pub scale: Option<Array>,
    /// Cap on logits: `cap * tanh(logit / cap)` keeps logits within `-cap..cap`.
    pub softcap: Option<Array>,
}

impl Head {
    /// Maps `[.., hidden]` to `[.., vocab]`.
    ///
    /// # Errors
    /// If `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array, embedding: &Embedding) -> Result<Array> {
        let logits = match &self.linear {
            Some(linear) => linear.forward(x)?,
            None => embedding.as_output(x)?,
        };
        self.scaled(logits)
    }

    /// Applies the factor and the cap.
    fn scaled(&self, mut logits: Array) -> Result<Array> {
        if let Some(scale) = &self.scale {
            logits = logits.multiply(scale)?;
        }
        match &self.softcap {
            Some(cap) => logits.divide(cap)?.tanh()?.multiply(cap),
            None => Ok(logits),
        }
    }

    /// Returns the `k` greatest logits of each row of `x`, as [`Decoder::greatest_logits`] does.
    /// `x` is the output of the last norm, `[.., hidden]`.
    pub fn greatest(
        &self,
        x: &Array,
        embedding: &Embedding,
        k: usize,
    ) -> Result<Option<(Array, Array)>> {
        // A zero or negative factor would change the order of the logits.
        let keeps_order = |factor: &Array| Ok(factor.astype(Dtype::Float32)?.item::<f32>()? > 0.0);
        for factor in [&self.scale, &self.softcap].into_iter().flatten() {
            if factor.size() != 1 || !keeps_order(factor)? {
                return Ok(None);
            }
        }
        let linear = match &self.linear {
            Some(linear) => linear,
            None => embedding.output()?,
        };
        match linear.greatest(x, k)? {
            Some((products, tokens)) => Ok(Some((self.scaled(products)?, tokens))),
            None => Ok(None),
        }
    }
}

/// The blocks that this process computes, first to last.
#[derive(Debug)]
pub struct Blocks<M: Mixer = Attention> {
    /// The blocks.
    pub blocks: Vec<Arc<Block<M>>>,
    /// This process's stage of a pipeline; `None` if this process computes all blocks.
    pub stage: Option<Stage>,
}

impl<M: Mixer> From<Vec<Arc<Block<M>>>> for Blocks<M> {
    /// Creates the blocks of a model without a pipeline.
    fn from(blocks: Vec<Arc<Block<M>>>) -> Self {
        Self {
            blocks,
            stage: None,
        }
    }
}

impl<M: Mixer> Deref for Blocks<M> {
    type Target = [Arc<Block<M>>];

    fn deref(&self) -> &Self::Target {
        &self.blocks
    }
}

/// A decoder of [`Block`]s.
#[derive(Debug)]
pub struct Stack<M: Mixer = Attention> {
    /// Token ids to vectors.
    pub embedding: Embedding,
    /// The factor on embeddings.
    pub embedding_scale: Option<Array>,
    /// The norm of the embedding (nanochat).
    pub embedding_norm: Option<Norm>,
    /// Learned position embeddings, added to the token embeddings (GPT-2).
    pub positions: Option<Embedding>,
    /// The blocks, first to last.
    pub blocks: Blocks<M>,
    /// The norm after the blocks.
    pub norm: Norm,
    /// The output head.
    pub head: Head,
}

impl<M: Mixer> Decoder for Stack<M> {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let stage = self.blocks.stage.as_ref();
        let mut x = match stage.filter(|stage| !stage.is_first()) {
            Some(stage) => stage.receive(ids.dim(1)?)?,
            None => self.embedded(ids, rows)?,
        };
        watch.begin(rows);
        watch.lap(None, StepPart::Embedding, &[&x])?;
        watch.saw_embedding(&x)?;
        let last = self.blocks.len().saturating_sub(1);
        // Only the last block may omit positions. The outputs of the other blocks determine the
        // keys of later blocks for all positions.
        let selected = match stage.filter(|stage| !stage.is_last()) {
            Some(_) => Positions::All,
            None => positions,
        };
        let fused = self.fused(rows, selected, watch);
        let most = if watch.wants_blocks() { 1 } else { fused.len() };
        let mut done = 0;
        for (i, block) in self.blocks.iter().enumerate() {
            if i < done {
                continue;
            }
            x = watch.states_at(i, Hook::ResidPre, x)?;
            // Fuses blocks up to the next block whose input or output a hook reads.
            let apart =
                |at: usize| watch.wants(at, Hook::ResidPost) || watch.wants(at + 1, Hook::ResidPre);
            let most = (i..fused.len())
                .position(apart)
                .map_or(most, |n| most.min(n + 1));
            let some = fused[i..].iter().map_while(|fused| *fused).take(most);
            if let Some((y, count)) = Fused::steps(some, &x, rows, i)? {
                done = i + count;
                x = watch.states_at(done - 1, Hook::ResidPost, y)?;
                watch.saw_block(done - 1, &x)?;
                continue;
            }
            let keep = if i == last { selected } else { Positions::All };
            x = match adapter::scope().filter(|scope| scope.checkpoint) {
                Some(scope) => block.forward_again(&x, &lengths(rows), i, keep, &scope)?,
                None => block.forward(&x, rows, i, keep, watch)?,
            };
            x = watch.states_at(i, Hook::ResidPost, x)?;
            watch.saw_block(i, &x)?;
        }
        if let Some(stage) = stage {
            let left = match positions {
                Positions::All => ids.dim(1)?,
                Positions::Last => i32::try_from(rows.len()).unwrap_or(i32::MAX),
            };
            x = stage.finish(&x, left)?;
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

    fn unembed(&self, x: &Array) -> Result<Array> {
        self.head.forward(&self.norm.forward(x)?, &self.embedding)
    }

    fn greatest_logits(&self, x: &Array, k: usize) -> Result<Option<(Array, Array)>> {
        let x = self.norm.forward(x)?;
        self.head.greatest(&x, &self.embedding, k)
    }

    fn hooks(&self) -> Option<Vec<LayerHooks>> {
        // In a pipeline, layer indices count only this process's layers, so hooks are not
        // supported.
        let is_undivided = self.blocks.stage.is_none();
        is_undivided.then(|| self.blocks.iter().map(|block| block.hooks()).collect())
    }

    fn token_vectors(&self, ids: &Array) -> Result<Array> {
        self.embedding.forward(ids)
    }

    fn token_scores(&self, x: &Array) -> Result<Array> {
        self.embedding.as_output(x)
    }

    fn attention(&self, layer: usize) -> Option<&Attention> {
        self.blocks.get(layer)?.mixer.as_attention()
    }

    fn feed_forward(&self, layer: usize) -> Option<&FeedForward> {
        self.blocks.get(layer).map(|block| &block.mlp)
    }

    fn keeps_row_order(&self) -> bool {
        // Mixtures sort positions by expert, and recurrent layers compute each row separately.
        let in_order = |block: &Arc<Block<M>>| {
            let is_dense = matches!(
                block.mlp,
                FeedForward::Gated(_)
                    | FeedForward::Scaled(_)
                    | FeedForward::Limited(_)
                    | FeedForward::Plain(_)
            );
            is_dense && block.mixer.as_attention().is_some()
        };
        self.blocks.stage.is_none() && self.blocks.iter().all(in_order)
    }

    fn feed_forward_mut(&mut self, layer: usize) -> Option<&mut FeedForward> {
        // In a pipeline, layer indices count only this process's blocks and differ from the
        // model's.
        if self.blocks.stage.is_some() {
            return None;
        }
        let block = Arc::get_mut(self.blocks.blocks.get_mut(layer)?)?;
        Some(&mut block.mlp)
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        let layers = || self.blocks.iter().map(|block| &block.mixer);
        let caches: Caches = layers().map(|layer| layer.new_state(options)).collect();
        let stage = self.blocks.stage.as_ref();
        caches
            .with_switches(layers().filter_map(Mixer::switch))
            .with_recurrent_elsewhere(stage.is_some_and(Stage::has_recurrent))
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs_core::{Device, QuantMode, Quantized, Stream, cpu};

    use super::*;
    use crate::exec::Weight;

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let value = |i: i32| ((i + seed) * 7919 % 10007) as f32 * 2e-4 - 1.0;
        Array::from_slice(&(0..n).map(value).collect::<Vec<_>>(), shape).unwrap()
    }

    #[test]
    fn the_greatest_logits_are_those_of_all() {
        let (tokens, hidden, k) = (300, 64, 5);
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let table = noise(&[tokens, hidden], 1);
            let quantized = Quantized::quantize(&table, 32, 4, QuantMode::Affine).unwrap();
            let weights = [Weight::Dense(table), Weight::Quantized(quantized)];
            for weight in weights {
                let embedding = Embedding::new(weight.clone(), Dtype::Float32, true).unwrap();
                for (tied, scale, softcap) in [
                    (true, None, None),
                    (false, Some(0.5f32), None),
                    (true, Some(2.0), Some(3.0f32)),
                    (true, Some(-1.0), None),
                ] {
                    let linear = || Linear::new(weight.clone(), Some(noise(&[tokens], 7)), true);
                    let head = Head {
                        linear: (!tied).then(|| linear().unwrap()),
                        scale: scale.map(|v| Array::scalar(v).unwrap()),
                        softcap: softcap.map(|v| Array::scalar(v).unwrap()),
                    };
                    let x = noise(&[1, 19, hidden], 3).multiply(&Array::scalar(0.1f32).unwrap());
                    let x = x.unwrap();
                    let greatest = head.greatest(&x, &embedding, k).unwrap();
                    let other = scale == Some(-1.0) || !cpu::enabled();
                    let Some((values, ids)) = greatest.filter(|_| !other) else {
                        assert!(other || cpu::instruction_set() == "amx", "not found");
                        continue;
                    };
                    let all = head
                        .forward(&x, &embedding)
                        .unwrap()
                        .to_vec::<f32>()
                        .unwrap();
                    let (values, ids) = (values.to_vec::<f32>(), ids.to_vec::<u32>());
                    let (values, ids) = (values.unwrap(), ids.unwrap());
                    for (i, row) in all.chunks_exact(tokens as usize).enumerate() {
                        let mut sorted = row.to_vec();
                        sorted.sort_by(|a, b| b.total_cmp(a));
                        for j in 0..k {
                            let (value, id) = (values[i * k + j], ids[i * k + j]);
                            assert!((value - sorted[j]).abs() < 1e-4, "{tied} {scale:?}");
                            assert!((value - row[id as usize]).abs() < 1e-4);
                        }
                    }
                }
            }
        });
    }
}
