//! Training steps and evaluations on pairs of replies without a reference model: odds ratio
//! preference optimization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{All, Array, eval};

use super::packed::{PackedPairs, check};
use super::preference::scaled;
use super::{ItemEvaluation, Preference, Sequence, StepReport, Trainer, weighed};
use crate::arch::Decoder;
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Scope, within};
use crate::train::loss::odds_ratio;

impl Trainer {
    /// Trains on a batch of preferences by [`odds_ratio`] plus the cross-entropy of the better
    /// replies. There is no reference model. `beta` is the weight of the odds ratio, usually 0.1.
    /// With `learn_prompt`, the cross-entropy also covers the prompts.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub fn step_by_odds_ratio(
        &mut self,
        batch: &[Preference],
        beta: f32,
        learn_prompt: bool,
    ) -> Result<StepReport> {
        let both = || batch.iter().flat_map(|p| [&p.chosen, &p.rejected]);
        check_beta(beta)?;
        check(&self.engine, both())?;
        let tokens = both().map(Sequence::learned).sum();
        let pairs = batch.len();
        let all = covered(batch, learn_prompt);
        let (batch, weight) = self.share(batch);
        // The first term is a mean over tokens, the second a mean over pairs, so their weights
        // differ.
        let share = weight.map(|weight| match weight {
            0.0 => 0.0,
            _ => covered(batch, learn_prompt) as f32 / all.max(1) as f32,
        });
        let loaded = Arc::clone(&self.engine);
        let decoder = loaded.decoder()?;
        let packed = loaded
            .scope(|| PackedPairs::new(batch))
            .map_err(engine("batch"))?;
        let scope = self.scope_of_batch();
        let (mut report, rewards) = self.step_by(tokens, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            within(Arc::new(scope), || {
                let terms = Terms::of(&packed, decoder.as_ref(), learn_prompt)?;
                let ratio = weighed(scaled(&terms.ratio, beta)?, weight)?;
                let loss = weighed(terms.cross_entropy, share)?.add(&ratio)?;
                let rewards = vec![scaled(&terms.chosen, beta)?, scaled(&terms.rejected, beta)?];
                Ok((loss, rewards))
            })
        })?;
        report.preference = self.pair_report(&rewards, pairs, weight != Some(0.0))?;
        Ok(report)
    }
}

/// Returns the loss of a model on pairs of replies, and how often the better reply has the greater
/// odds.
pub(in crate::train) fn evaluate_odds_ratio_on(
    loaded: &Engine,
    batch: &[Preference],
    beta: f32,
    learn_prompt: bool,
) -> Result<ItemEvaluation> {
    let both = || batch.iter().flat_map(|p| [&p.chosen, &p.rejected]);
    check_beta(beta)?;
    check(loaded, both())?;
    let decoder = loaded.decoder()?;
    let (loss, chosen, rejected) = loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let packed = PackedPairs::new(batch)?;
            let terms = Terms::of(&packed, decoder.as_ref(), learn_prompt)?;
            let loss = terms.cross_entropy.add(&scaled(&terms.ratio, beta)?)?;
            eval([&loss, &terms.chosen, &terms.rejected])?;
            let (chosen, rejected) = (terms.chosen.to_f32_vec()?, terms.rejected.to_f32_vec()?);
            Ok((loss.item::<f32>()?, chosen, rejected))
        })
        .map_err(engine("evaluate"))?;
    Ok(ItemEvaluation {
        loss: f64::from(loss) * batch.len() as f64,
        items: batch.len(),
        correct: chosen.iter().zip(&rejected).filter(|(a, b)| a > b).count(),
        tokens: both().map(Sequence::learned).sum(),
    })
}

/// Returns the number of tokens that the cross-entropy covers.
fn covered(batch: &[Preference], learn_prompt: bool) -> usize {
    let of = |one: &Sequence| match learn_prompt {
        true => one.ids.len().saturating_sub(1),
        false => one.learned(),
    };
    batch.iter().map(|pair| of(&pair.chosen)).sum()
}

fn check_beta(beta: f32) -> Result<()> {
    if beta.is_finite() && beta > 0.0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidOption,
        format!("beta is {beta}; it must be a number above 0"),
    ))
}

/// The terms of the loss, and the mean log-probability per token of each reply.
struct Terms {
    /// The mean cross-entropy of the better replies, a scalar.
    cross_entropy: Array,
    /// The mean of [`odds_ratio`], a scalar.
    ratio: Array,
    /// `[pairs]`.
    chosen: Array,
    /// `[pairs]`.
    rejected: Array,
}

impl Terms {
    fn of(
        packed: &PackedPairs,
        decoder: &dyn Decoder,
        learn_prompt: bool,
    ) -> mlx_rs_core::Result<Self> {
        let each = packed.chosen.each(decoder)?;
        let chosen = packed.chosen.means(&each)?;
        let rejected = packed.rejected.means(&packed.rejected.each(decoder)?)?;
        let cross_entropy = match learn_prompt {
            true => each.mean(All, false)?,
            false => {
                let mask = &packed.chosen.mask;
                let sum = each.multiply(mask)?.sum(All, false)?;
                sum.divide(&mask.sum(All, false)?)?
            }
        };
        Ok(Self {
            cross_entropy: cross_entropy.negative()?,
            ratio: odds_ratio(&chosen, &rejected)?.mean(All, false)?,
            chosen,
            rejected,
        })
    }
}
