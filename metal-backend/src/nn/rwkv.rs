//! RWKV-7 (Peng et al. 2025, arXiv:2503.14456): a block with time mixing, which is recurrent, and
//! channel mixing. Both read each position together with its previous position. `diagonal_rule.rs`
//! computes the recurrence.

use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use super::adapter;
use super::diagonal_rule::{Inputs, scan};
use super::head_norm::HeadNorm;
use super::hooks::Watch;
use super::linear::Linear;
use super::norm::{Norm, through};
use super::recurrence::{over_rows, part};
use crate::cache::{Row, StateLayout, StatePart};
use crate::exec::Activation;
use crate::exec::activation::{sigmoid, tanh};

/// The logarithm of the strongest decay, `-exp(-1/2)`.
const DECAY: f32 = -0.606_530_66;

/// The lower bound of the sum of squares that normalizes a key.
const LEAST: f32 = 1e-12;

/// A block: time mixing and channel mixing, each with a norm and a residual.
#[derive(Debug)]
pub struct RwkvBlock {
    /// The norm of the embedding, in the first block.
    pub pre_norm: Option<Norm>,
    /// The norm before time mixing.
    pub time_norm: Norm,
    /// Time mixing.
    pub time: TimeMix,
    /// The norm before channel mixing.
    pub channel_norm: Norm,
    /// Channel mixing.
    pub channel: ChannelMix,
    /// The layer's sizes.
    pub shape: RwkvShape,
    /// The layout of the state, from [`RwkvShape::layout`].
    pub layout: Arc<StateLayout>,
}

/// Sizes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RwkvShape {
    /// Heads.
    pub heads: i32,
    /// Elements per head.
    pub dim: i32,
}

impl RwkvShape {
    /// Returns the layout of a row's state, in float32: the last inputs of time mixing and of
    /// channel mixing, and one matrix per head.
    pub fn layout(&self) -> Arc<StateLayout> {
        let last = [1, self.heads * self.dim];
        StateLayout::new(
            "time_mix",
            vec![
                StatePart::new("time", &last),
                StatePart::new("S", &[self.heads, self.dim, self.dim]),
                StatePart::new("channel", &last),
            ],
        )
    }
}

/// Time mixing. Each vector has one element per hidden element.
#[derive(Debug)]
pub struct TimeMix {
    /// The weights of the previous position in the inputs of receptance, decay, keys, values, rates
    /// and gates, in this order.
    pub shares: [Array; 6],
    /// Factors on keys before they are normalized.
    pub key_scale: Array,
    /// How strongly the rates change the keys.
    pub key_rate: Array,
    /// Factors on the product of receptance and keys, `[heads, dim]`.
    pub bonus: Array,
    /// `[hidden] -> [hidden]`: the queries.
    pub receptance: Linear,
    /// `[hidden] -> [hidden]`.
    pub key: Linear,
    /// `[hidden] -> [hidden]`.
    pub value: Linear,
    /// `[hidden] -> [hidden]`.
    pub output: Linear,
    /// The low-rank projection of decays, with a tanh between the matrices.
    pub decay: [Linear; 2],
    /// The low-rank projection of the weight of the first block's values; `None` in the first
    /// block.
    pub first_share: Option<[Linear; 2]>,
    /// The low-rank projection of in-context learning rates.
    pub rate: [Linear; 2],
    /// The low-rank projection of output gates, with a sigmoid between the matrices.
    pub gate: [Linear; 2],
    /// The norm of each head's output.
    pub norm: HeadNorm,
}

/// Channel mixing: `value(relu(key(x))^2)`.
#[derive(Debug)]
pub struct ChannelMix {
    /// The weight of the previous position in the input.
    pub share: Array,
    /// `[hidden] -> [intermediate]`.
    pub key: Linear,
    /// `[intermediate] -> [hidden]`.
    pub value: Linear,
}

impl RwkvBlock {
    /// Maps `[1, T, hidden]` to `[1, T, hidden]`. Also returns the first block's values, `[1, T,
    /// hidden]`, which the caller passes to every later block as `first`. `first` is `None` for the
    /// first block.
    ///
    /// # Errors
    /// If shapes do not match.
    pub fn forward(
        &self,
        x: &Array,
        first: Option<&Array>,
        rows: &mut [Row<'_>],
        layer: usize,
        watch: &mut Watch<'_>,
    ) -> Result<(Array, Array)> {
        let looked_at = watch.wants_mixed();
        let x = through(self.pre_norm.as_ref(), x)?;
        let hidden = x.dim(-1)?;
        let all = over_rows(rows, layer, &self.layout, |span, state| {
            let x = span.of(&x)?;
            let first = first.map(|first| span.of(first)).transpose()?;
            let normed = self.time_norm.forward(&x)?;
            let (before, last_time) = previous(&normed, part(&state, 0)?)?;
            let (mixed, values, memory) =
                self.mix_time(&normed, &before, first.as_ref(), part(&state, 1)?)?;
            let mixed = x.add(&mixed)?;
            let normed = self.channel_norm.forward(&mixed)?;
            let (before, last_channel) = previous(&normed, part(&state, 2)?)?;
            let x = mixed.add(&self.channel.forward(&normed, &before)?)?;
            let mut outputs = vec![&x, &values];
            outputs.extend(looked_at.then_some(&mixed));
            let all = concatenate(&outputs, -1)?;
            Ok((all, vec![last_time, memory, last_channel]))
        })?;
        let part = |from: i32| all.slice_axis(-1, from, from + hidden);
        if looked_at {
            watch.saw_mixed(layer, &part(2 * hidden)?)?;
        }
        Ok((part(0)?, part(hidden)?))
    }

    /// Returns the output of time mixing for `x` `[R, L, hidden]`, the first block's values, and
    /// the memory after the last position. `before` contains the previous position of each position
    /// of `x`.
    fn mix_time(
        &self,
        x: &Array,
        before: &Array,
        first: Option<&Array>,
        memory: &Array,
    ) -> Result<(Array, Array, Array)> {
        let RwkvShape { heads, dim } = self.shape;
        let time = &self.time;
        let differentiated = adapter::differentiated();
        let change = before.subtract(x)?;
        let mixed = |at: usize| x.add(&change.multiply(&time.shares[at])?);
        let wide = |a: &Array| a.astype(Dtype::Float32);
        let apart = [x.dim(0)?, x.dim(1)?, heads, dim];
        let split = |a: &Array| wide(a)?.reshape(&apart);
        let receptance = time.receptance.forward(&mixed(0)?)?;
        let [down, up] = &time.decay;
        let decay = wide(&up.forward(&tanh(&down.forward(&mixed(1)?)?, differentiated)?)?)?;
        let decay = sigmoid(&decay, differentiated)?.multiply(&Array::scalar(DECAY)?)?;
        let key = wide(&time.key.forward(&mixed(2)?)?)?;
        let [down, up] = &time.rate;
        let rate = wide(&up.forward(&down.forward(&mixed(4)?)?)?)?;
        let rate = sigmoid(&rate, differentiated)?;
        let of_values = mixed(3)?;
        let mut value = time.value.forward(&of_values)?;
        let first = match (&time.first_share, first) {
            (Some([down, up]), Some(first)) => {
                let share = up.forward(&down.forward(&of_values)?)?;
                let share = sigmoid(&share, differentiated)?;
                value = value.add(&first.subtract(&value)?.multiply(&share)?)?;
                first.clone()
            }
            _ => value.clone(),
        };
        let [down, up] = &time.gate;
        let gate = sigmoid(&down.forward(&mixed(5)?)?, differentiated)?;
        let gate = up.forward(&gate)?;
        let one = Array::scalar(1.0f32)?;
        let removed = unit(&split(&key.multiply(&wide(&time.key_scale)?)?)?)?;
        let change = rate.subtract(&one)?.multiply(&wide(&time.key_rate)?)?;
        let key = split(&key.multiply(&change.add(&one)?)?)?;
        let (receptance, value) = (split(&receptance)?, split(&value)?);
        let inputs = Inputs {
            q: receptance.clone(),
            k: key.clone(),
            v: value.clone(),
            f: split(&decay)?,
            a: removed.negative()?,
            b: Some(removed.multiply(&split(&rate)?)?),
        };
        let (y, memory) = scan(&inputs, memory)?;
        let normed = time.norm.forward(&y, Dtype::Float32)?;
        let bonus = wide(&time.bonus)?; // [H, D]
        let bonus = receptance
            .multiply(&key)?
            .multiply(&bonus)?
            .sum(-1, true)?
            .multiply(&value)?;
        let bonus = bonus.reshape(normed.shape())?;
        let y = normed.add(&bonus)?.astype(x.dtype())?.multiply(&gate)?;
        Ok((time.output.forward(&y)?, first, memory))
    }
}

impl ChannelMix {
    /// Maps `[R, L, hidden]` to `[R, L, hidden]`. `before` contains the previous position of each
    /// position of `x`.
    fn forward(&self, x: &Array, before: &Array) -> Result<Array> {
        let mixed = x.add(&before.subtract(x)?.multiply(&self.share)?)?;
        let y = Activation::Relu2.apply(&self.key.forward(&mixed)?)?;
        self.value.forward(&y)
    }
}

/// Returns the previous position of each position of `x` `[R, L, hidden]`, and the last position in
/// float32. `last` `[R, 1, hidden]` is the position before the first.
fn previous(x: &Array, last: &Array) -> Result<(Array, Array)> {
    let length = x.dim(1)?;
    let all = concatenate(&[&last.astype(x.dtype())?, x], 1)?;
    let last = all.slice_axis(1, length, length + 1)?;
    Ok((all.slice_axis(1, 0, length)?, last.astype(Dtype::Float32)?))
}

/// Normalizes `x` to length one along the last axis.
fn unit(x: &Array) -> Result<Array> {
    let squares = x.multiply(x)?.sum(-1, true)?;
    x.multiply(&squares.maximum(&Array::scalar(LEAST)?)?.rsqrt()?)
}
