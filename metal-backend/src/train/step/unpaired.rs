//! Training steps and evaluations on single replies with verdicts: Kahneman-Tversky optimization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{All, Array, eval};

use super::packed::{Packed, check};
use super::preference::scaled;
use super::{
    ItemEvaluation, JudgedReply, PreferenceReport, Sequence, StepReport, Trainer, weighed,
};
use crate::arch::Decoder;
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Scope, within};
use crate::train::loss::{Kto, kto};

impl Trainer {
    /// Trains on a batch of replies with verdicts by [`kto`], relative to the model without its
    /// adapter.
    ///
    /// # Errors
    /// The errors of [`Self::step`]; also [`ErrorKind::InvalidOption`] for a batch of one reply, in
    /// which the divergence cannot be estimated.
    pub fn step_by_verdict(&mut self, batch: &[JudgedReply], options: Kto) -> Result<StepReport> {
        check_batch(&self.engine, batch, options)?;
        let tokens = batch.iter().map(|one| one.reply.learned()).sum();
        let loaded = Arc::clone(&self.engine);
        let decoder = loaded.decoder()?;
        let others = mismatched(batch);
        let (others, weight) = self.share(&others);
        let counts = weight != Some(0.0);
        let sum = loaded
            .scope(|| divergences(others, decoder.as_ref()))
            .map_err(engine("batch"))?;
        let sums = self.sums(vec![sum], counts)?;
        let reference = reference(sums.first().copied().unwrap_or(0.0), batch.len());
        let (part, _) = self.share(batch);
        let (packed, base) = loaded
            .scope(|| {
                let packed = Packed::new(part.iter().map(|one| &one.reply))?;
                let base = packed.base_logprobs(decoder.as_ref())?;
                Ok((packed, base))
            })
            .map_err(engine("batch"))?;
        let desirable: Vec<bool> = part.iter().map(|one| one.desirable).collect();
        let scope = self.scope_of_batch();
        let (mut report, gains) = self.step_by(tokens, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            within(Arc::new(scope), || {
                let ratios = packed.logprobs(decoder.as_ref())?.subtract(&base)?;
                let losses = kto(&ratios, reference, &desirable, options)?;
                let loss = weighed(losses.mean(All, false)?, weight)?;
                Ok((loss, vec![scaled(&ratios, options.beta)?]))
            })
        })?;
        let rewards = self
            .engine
            .scope(|| gains.first().map(Array::to_f32_vec).transpose())
            .map_err(engine("rewards"))?
            .unwrap_or_default();
        let tally = Tally::of(&rewards, &desirable, options.beta * reference);
        let sums = self.sums(tally.sums(), counts)?;
        report.preference = Tally::report(&sums);
        Ok(report)
    }
}

/// Returns the loss of a model on replies with verdicts, and the number of replies whose reward
/// agrees with the verdict: above the reference point if desirable, otherwise below it.
pub(in crate::train) fn evaluate_verdicts_on(
    loaded: &Engine,
    batch: &[JudgedReply],
    options: Kto,
) -> Result<ItemEvaluation> {
    check_batch(loaded, batch, options)?;
    let decoder = loaded.decoder()?;
    let desirable: Vec<bool> = batch.iter().map(|one| one.desirable).collect();
    let (losses, ratios, reference) = loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let sum = divergences(&mismatched(batch), decoder.as_ref())?;
            let reference = reference(sum, batch.len());
            let packed = Packed::new(batch.iter().map(|one| &one.reply))?;
            let base = packed.base_logprobs(decoder.as_ref())?;
            let ratios = packed.logprobs(decoder.as_ref())?.subtract(&base)?;
            let losses = kto(&ratios, reference, &desirable, options)?;
            eval([&losses, &ratios])?;
            Ok((losses.to_f32_vec()?, ratios.to_f32_vec()?, reference))
        })
        .map_err(engine("evaluate"))?;
    Ok(ItemEvaluation {
        loss: losses.iter().map(|loss| f64::from(*loss)).sum(),
        items: batch.len(),
        correct: Tally::of(&ratios, &desirable, reference).right,
        tokens: batch.iter().map(|one| one.reply.learned()).sum(),
    })
}

fn check_batch(loaded: &Engine, batch: &[JudgedReply], options: Kto) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    options
        .check()
        .map_err(|message| Error::new(ErrorKind::InvalidOption, message))?;
    check(loaded, batch.iter().map(|one| &one.reply))?;
    if batch.len() < 2 {
        return bad(String::from(
            "the batch has one reply; at least two are needed, because each prompt is also paired \
             with another reply",
        ));
    }
    Ok(())
}

/// Returns each prompt with the reply of the previous example; the first prompt gets the last
/// reply. Each pair is truncated to the length of the batch's longest sequence, but keeps at least
/// one token of the reply.
fn mismatched(batch: &[JudgedReply]) -> Vec<Sequence> {
    let most = batch.iter().map(|one| one.reply.ids.len()).max();
    let before = batch.last().into_iter().chain(batch);
    batch
        .iter()
        .zip(before)
        .map(|(one, before)| {
            let (prompt, reply) = (&one.reply, &before.reply);
            let from = prompt.from.max(1);
            let reply = reply.ids.get(reply.from.max(1)..).unwrap_or_default();
            let mut ids = [prompt.ids.get(..from).unwrap_or_default(), reply].concat();
            ids.truncate(most.unwrap_or_default().max(from + 1));
            Sequence::new(ids).with_prompt(from)
        })
        .collect()
}

/// Returns the sum over sequences of `logprob(adapted model) - logprob(base model)`, in nats.
fn divergences(batch: &[Sequence], decoder: &dyn Decoder) -> mlx_rs_core::Result<f32> {
    let packed = Packed::new(batch.iter())?;
    let base = packed.base_logprobs(decoder)?;
    packed
        .logprobs(decoder)?
        .subtract(&base)?
        .sum(All, false)?
        .item::<f32>()
}

/// Returns the reference point: the estimated divergence, which is never below 0.
fn reference(sum: f32, replies: usize) -> f32 {
    (sum / replies.max(1) as f32).max(0.0)
}

/// Sums over replies, for the report.
#[derive(Default)]
struct Tally {
    desirable: f32,
    of_desirable: f32,
    undesirable: f32,
    of_undesirable: f32,
    right: usize,
}

impl Tally {
    /// Sums over this process's replies. `reference` has the unit of `rewards`.
    fn of(rewards: &[f32], desirable: &[bool], reference: f32) -> Self {
        let mut tally = Self::default();
        for (reward, desirable) in rewards.iter().zip(desirable) {
            if *desirable {
                tally.desirable += 1.0;
                tally.of_desirable += reward;
            } else {
                tally.undesirable += 1.0;
                tally.of_undesirable += reward;
            }
            tally.right += usize::from((*reward > reference) == *desirable);
        }
        tally
    }

    fn sums(&self) -> Vec<f32> {
        vec![
            self.desirable,
            self.of_desirable,
            self.undesirable,
            self.of_undesirable,
            self.right as f32,
        ]
    }

    /// Returns the means, computed from the sums over all processes.
    fn report(sums: &[f32]) -> Option<PreferenceReport> {
        let [desirable, of_desirable, undesirable, of_undesirable, right] = *sums else {
            return None;
        };
        Some(PreferenceReport {
            chosen: of_desirable / desirable.max(1.0),
            rejected: of_undesirable / undesirable.max(1.0),
            accuracy: right / (desirable + undesirable).max(1.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_get_the_reply_before_them() {
        let one = |ids: &[u32], from| JudgedReply {
            reply: Sequence::new(ids.to_vec()).with_prompt(from),
            desirable: true,
        };
        let batch = [
            one(&[1, 2, 9], 2),
            one(&[3, 7, 8], 1),
            one(&[4, 5, 6, 10], 3),
        ];
        let got: Vec<_> = mismatched(&batch)
            .into_iter()
            .map(|one| (one.ids, one.from))
            .collect();
        // The last sequence would have five ids, but the longest sequence of the batch has four.
        let expected = [(vec![1, 2, 10], 2), (vec![3, 9], 1), (vec![4, 5, 6, 7], 3)];
        assert_eq!(got, expected);
    }
}
