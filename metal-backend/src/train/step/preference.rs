//! Training steps and evaluations on pairs of replies: direct preference optimization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval};

use super::packed::{PackedPairs, check};
use super::{ItemEvaluation, Preference, PreferenceReport, Sequence, StepReport, Trainer, weighed};
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Scope, within};
use crate::train::loss::dpo;

impl Trainer {
    /// Trains on a batch of preferences by [`dpo`], relative to the model without its adapter.
    /// `beta` is the penalty on deviation from that model, usually 0.1. `smoothing` is the assumed
    /// fraction of wrong labels.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub fn step_by_preference(
        &mut self,
        batch: &[Preference],
        beta: f32,
        smoothing: f32,
    ) -> Result<StepReport> {
        check_dpo(beta, smoothing)?;
        let both = || batch.iter().flat_map(|p| [&p.chosen, &p.rejected]);
        check(&self.engine, both())?;
        let tokens = both().map(Sequence::learned).sum();
        let pairs = batch.len();
        let (batch, weight) = self.share(batch);
        let loaded = Arc::clone(&self.engine);
        let decoder = loaded.decoder()?;
        let (packed, base) = loaded
            .scope(|| {
                let packed = PackedPairs::new(batch)?;
                let base = packed.without_adapters(decoder.as_ref())?;
                Ok((packed, base))
            })
            .map_err(engine("batch"))?;
        let scope = self.scope_of_batch();
        let (mut report, rewards) = self.step_by(tokens, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            within(Arc::new(scope), || {
                let tuned = packed.logprobs(decoder.as_ref())?;
                let loss = dpo((&tuned.0, &tuned.1), (&base.0, &base.1), beta, smoothing)?;
                let reward = |tuned: &Array, base: &Array| scaled(&tuned.subtract(base)?, beta);
                let rewards = vec![reward(&tuned.0, &base.0)?, reward(&tuned.1, &base.1)?];
                Ok((weighed(loss, weight)?, rewards))
            })
        })?;
        report.preference = self.pair_report(&rewards, pairs, weight != Some(0.0))?;
        Ok(report)
    }

    /// Returns this process's share of a batch whose loss is a mean over examples, and the weight
    /// of that share. The weight is `None` if this process trains alone.
    pub(super) fn share<'a, T>(&self, batch: &'a [T]) -> (&'a [T], Option<f32>) {
        match &self.together {
            Some(together) => match together.part(batch) {
                (part, true) => (part, Some(part.len() as f32 / batch.len().max(1) as f32)),
                (part, false) => (part, Some(0.0)),
            },
            None => (batch, None),
        }
    }

    /// Returns the sums of `values` over all processes. Ignores this process's values unless
    /// `counts`.
    pub(super) fn sums(&self, mut values: Vec<f32>, counts: bool) -> Result<Vec<f32>> {
        match &self.together {
            Some(together) => {
                if !counts {
                    values.fill(0.0);
                }
                together.sums(&values)
            }
            None => Ok(values),
        }
    }

    /// Returns the report for `pairs` pairs over all processes. `rewards` are this process's
    /// rewards of the better and of the worse replies, `[pairs]` each.
    pub(super) fn pair_report(
        &self,
        rewards: &[Array],
        pairs: usize,
        counts: bool,
    ) -> Result<Option<PreferenceReport>> {
        let rewards: Vec<Vec<f32>> = self
            .engine()
            .scope(|| {
                rewards
                    .iter()
                    .map(Array::to_f32_vec)
                    .collect::<mlx_rs_core::Result<_>>()
            })
            .map_err(engine("rewards"))?;
        let [chosen, rejected] = rewards.as_slice() else {
            return Ok(None);
        };
        let right = chosen.iter().zip(rejected).filter(|(a, b)| a > b).count();
        let sums = vec![chosen.iter().sum(), rejected.iter().sum(), right as f32];
        let sums = self.sums(sums, counts)?;
        let mean = |at: usize| sums.get(at).map_or(0.0, |sum| sum / pairs.max(1) as f32);
        Ok(Some(PreferenceReport {
            chosen: mean(0),
            rejected: mean(1),
            accuracy: mean(2),
        }))
    }
}

/// Returns `x * factor`.
pub(super) fn scaled(x: &Array, factor: f32) -> mlx_rs_core::Result<Array> {
    x.multiply(&x.scalar_like(factor)?)
}

/// Returns an error for parameters that are out of range for [`dpo`].
fn check_dpo(beta: f32, smoothing: f32) -> Result<()> {
    if beta.is_finite() && beta > 0.0 && (0.0..0.5).contains(&smoothing) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidOption,
        format!(
            "beta is {beta} and smoothing {smoothing}; they must be above 0, and in 0 to below 0.5"
        ),
    ))
}

/// Returns the loss of a model on pairs of replies, and how often the better reply has the greater
/// reward relative to the base model.
pub(in crate::train) fn evaluate_pairs_on(
    loaded: &Engine,
    batch: &[Preference],
    beta: f32,
    smoothing: f32,
) -> Result<ItemEvaluation> {
    check_dpo(beta, smoothing)?;
    let both = || batch.iter().flat_map(|p| [&p.chosen, &p.rejected]);
    check(loaded, both())?;
    let decoder = loaded.decoder()?;
    let (loss, margins) = loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let packed = PackedPairs::new(batch)?;
            let base = packed.without_adapters(decoder.as_ref())?;
            let tuned = packed.logprobs(decoder.as_ref())?;
            let loss = dpo((&tuned.0, &tuned.1), (&base.0, &base.1), beta, smoothing)?;
            let margin = tuned
                .0
                .subtract(&tuned.1)?
                .subtract(&base.0.subtract(&base.1)?)?;
            eval([&loss, &margin])?;
            Ok((loss.item::<f32>()?, margin.to_f32_vec()?))
        })
        .map_err(engine("evaluate"))?;
    Ok(ItemEvaluation {
        loss: f64::from(loss) * batch.len() as f64,
        items: batch.len(),
        correct: margins.iter().filter(|margin| **margin > 0.0).count(),
        tokens: both().map(Sequence::learned).sum(),
    })
}
