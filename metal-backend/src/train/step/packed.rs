//! Packs the sequences of a batch into arrays, and computes a decoder's outputs for them.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{All, Array, eval};

use super::{Preference, Sequence};
use crate::arch::Decoder;
use crate::cache::{CacheOptions, passing};
use crate::engine::Engine;
use crate::nn::adapter::{Scope, within};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::train::loss::{cross_entropy_each, masked_cross_entropy};

/// Returns an error for sequences that cannot be processed or have no targets.
pub(super) fn check<'a>(engine: &Engine, batch: impl Iterator<Item = &'a Sequence>) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    let mut any = false;
    for (i, sequence) in batch.enumerate() {
        any = true;
        engine.check_prompt(&sequence.ids)?;
        if sequence.learned() == 0 {
            return bad(format!(
                "sequence {i} has {} tokens, of which {} are given; nothing is left to learn",
                sequence.ids.len(),
                sequence.from.max(1)
            ));
        }
    }
    if any {
        return Ok(());
    }
    bad(String::from(
        "the batch is empty; give at least one sequence",
    ))
}

/// Packed sequences, each without its last token, and the target of each position.
pub(super) struct Packed {
    pub ids: Array,
    pub targets: Array,
    pub mask: Array,
    pub lengths: Vec<i32>,
    /// The divisor of the logits in [`Self::each`].
    pub temperature: f32,
}

impl Packed {
    pub fn new<'a>(batch: impl Iterator<Item = &'a Sequence>) -> mlx_rs_core::Result<Self> {
        let (mut ids, mut targets, mut mask) = (Vec::new(), Vec::new(), Vec::new());
        let mut lengths = Vec::new();
        for sequence in batch {
            let Some((_, inputs)) = sequence.ids.split_last() else {
                continue;
            };
            ids.extend_from_slice(inputs);
            targets.extend_from_slice(&sequence.ids[1..]);
            let learned =
                (1..sequence.ids.len()).map(|at| f32::from(u8::from(at >= sequence.from)));
            mask.extend(learned);
            lengths.push(i32::try_from(inputs.len()).unwrap_or(i32::MAX));
        }
        let total = i32::try_from(ids.len()).unwrap_or(i32::MAX);
        Ok(Self {
            ids: Array::from_slice(&ids, &[1, total])?,
            targets: Array::from_slice(&targets, &[1, total])?,
            mask: Array::from_slice(&mask, &[1, total])?,
            lengths,
            temperature: 1.0,
        })
    }

    /// Divides logits by `temperature`, so that log-probabilities refer to the distribution from
    /// which replies are drawn.
    pub fn with_temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// The logits, `[1, T, vocab]`.
    pub fn logits(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        let layers = decoder.new_caches(&CacheOptions::default()).len();
        let mut caches = passing::caches(self.lengths.len(), layers);
        let mut rows = passing::rows(&self.lengths, &mut caches);
        decoder.forward(&self.ids, &mut rows, Positions::All, &mut Watch::nothing())
    }

    pub fn loss(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        masked_cross_entropy(&self.logits(decoder)?, &self.targets, &self.mask)
    }

    /// Returns the sum of the targets' log-probabilities for each sequence, `[rows]`.
    pub fn logprobs(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        self.sums(&self.each(decoder)?)
    }

    /// Computes [`Self::logprobs`] for the model without its adapter. The result is evaluated, so
    /// no gradient flows through it.
    pub fn base_logprobs(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        without_adapters(|| {
            let sums = self.logprobs(decoder)?;
            sums.eval()?;
            Ok(sums)
        })
    }

    /// Returns the log-probability of each token except the first of a sequence, `[1, T]`,
    /// including tokens that are not targets.
    pub fn each(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        let mut logits = self.logits(decoder)?;
        if self.temperature != 1.0 {
            logits = logits.divide(&logits.scalar_like(self.temperature)?)?;
        }
        cross_entropy_each(&logits, &self.targets)?.negative()
    }

    /// Computes [`Self::each`] for the model without its adapter and without gradient.
    pub fn base_each(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<Array> {
        without_adapters(|| {
            let each = self.each(decoder)?;
            each.eval()?;
            Ok(each)
        })
    }

    /// Sums `each` `[1, T]` over the targets of each sequence: `[rows]`.
    pub fn sums(&self, each: &Array) -> mlx_rs_core::Result<Array> {
        let each = each.multiply(&self.mask)?;
        let mut from = 0;
        let sums = self
            .lengths
            .iter()
            .map(|&length| {
                let to = from + length;
                let sum = each
                    .slice_axis(1, from, to)?
                    .sum(All, true)?
                    .reshape(&[1])?;
                from = to;
                Ok(sum)
            })
            .collect::<mlx_rs_core::Result<Vec<_>>>()?;
        mlx_rs_core::concatenate(&sums.iter().collect::<Vec<_>>(), 0)
    }
}

impl Packed {
    /// Averages `each` `[1, T]` over the targets of each sequence: `[rows]`.
    pub fn means(&self, each: &Array) -> mlx_rs_core::Result<Array> {
        let counts = self.sums(&each.ones_like()?)?;
        self.sums(each)?.divide(&counts)
    }
}

/// The better replies and the worse replies of a batch, packed separately.
pub(super) struct PackedPairs {
    pub chosen: Packed,
    pub rejected: Packed,
}

impl PackedPairs {
    pub fn new(batch: &[Preference]) -> mlx_rs_core::Result<Self> {
        Ok(Self {
            chosen: Packed::new(batch.iter().map(|pair| &pair.chosen))?,
            rejected: Packed::new(batch.iter().map(|pair| &pair.rejected))?,
        })
    }

    /// Returns [`Packed::logprobs`] of the better and of the worse replies, `[pairs]` each.
    pub fn logprobs(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<(Array, Array)> {
        Ok((
            self.chosen.logprobs(decoder)?,
            self.rejected.logprobs(decoder)?,
        ))
    }

    /// Computes [`Self::logprobs`] for the model without its adapter. The result is evaluated, so
    /// no gradient flows through it.
    pub fn without_adapters(&self, decoder: &dyn Decoder) -> mlx_rs_core::Result<(Array, Array)> {
        without_adapters(|| {
            let both = self.logprobs(decoder)?;
            eval([&both.0, &both.1])?;
            Ok(both)
        })
    }
}

/// Runs `f` with the model without its adapter.
fn without_adapters<R>(f: impl FnOnce() -> R) -> R {
    let scope = Scope {
        without_adapters: true,
        ..Scope::default()
    };
    within(Arc::new(scope), f)
}
