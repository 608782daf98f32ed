//! The judged replies of a run. Several updates use the same replies, so the resume state saves
//! them when a run stops between these updates.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;

use super::dataset::PromptLine;
use super::loss::Grpo;
use super::plan::bad;
use super::reward::{Reward, RewardCommand};
use super::rollout::{Rollouts, Sampling, rollouts};
use super::step::{Rollout, Sequence, StepReport, Trainer};
use crate::adapter::Params;

/// The reward, and the replies of the current updates.
#[derive(Default)]
pub(super) struct Replies {
    reward: Option<Box<dyn Reward>>,
    /// The replies of each batch of an update, in order.
    kept: Vec<Rollouts>,
}

impl Replies {
    /// Sets the reward that judges replies.
    pub fn judge_with(&mut self, reward: impl Reward + 'static) {
        self.reward = Some(Box::new(reward));
    }

    /// Starts the program that judges replies, unless a reward is already set.
    pub fn start(&mut self, command: Option<&str>) -> Result<()> {
        if self.reward.is_none() {
            let command = command.ok_or_else(|| {
                bad("method grpo needs reward_command, or Run::with_reward in a program")
            })?;
            self.judge_with(RewardCommand::start(command)?);
        }
        Ok(())
    }

    /// Trains on replies to the prompts from `next`, or again on the current replies. Returns the
    /// number of batches taken from `next` (0 or 1), and the report.
    pub fn step<'p>(
        &mut self,
        trainer: &mut Trainer,
        (grpo, sampling): (Grpo, Sampling),
        next: impl FnOnce() -> Vec<&'p PromptLine>,
    ) -> Result<(u64, StepReport)> {
        let batches = trainer.tuning().accumulation.max(1) as u64;
        let at = position(trainer.batches(), batches, sampling.num_iterations);
        let is_new = at < batches;
        if is_new {
            if at == 0 {
                self.kept.clear();
            }
            let reward = self.reward.as_deref_mut();
            let reward = reward.ok_or_else(|| bad("there is no reward"))?;
            let (engine, seed) = (trainer.shared_engine(), trainer.seed_of_batch());
            let made = rollouts(&engine, &next(), (grpo, sampling), seed, reward)?;
            self.kept.push(made);
        }
        let used = usize::try_from(at % batches)
            .ok()
            .and_then(|i| self.kept.get_mut(i))
            .ok_or_else(|| bad("the replies of earlier steps are missing"))?;
        let mut report = trainer.step_by_policy(&mut used.replies, grpo)?;
        if let Some(policy) = &mut report.policy {
            (policy.reward, policy.reward_std) = (used.reward, used.reward_std);
        }
        Ok((u64::from(is_new), report))
    }

    /// Returns the replies that the step after `step` uses again, as arrays by name.
    pub fn to_arrays(&self, step: u64, trainer: &Trainer, iterations: u64) -> Result<Params> {
        let batches = trainer.tuning().accumulation.max(1) as u64;
        let mut all = Params::new();
        if position(step, batches, iterations) == 0 {
            return Ok(all);
        }
        let failed =
            |e| Error::new(ErrorKind::Engine, "the replies cannot be written").with_source(e);
        for (i, made) in self.kept.iter().enumerate() {
            for (name, array) in arrays(made).map_err(failed)? {
                all.insert(format!("{i}/{name}"), array);
            }
        }
        Ok(all)
    }

    /// Restores replies from the result of [`Self::to_arrays`]. `None` if the arrays are damaged.
    pub fn restore(&mut self, arrays: &Params) -> Option<()> {
        let batches = arrays.keys().filter(|name| name.ends_with("/reward"));
        let made = (0..batches.count()).map(|i| from_arrays(arrays, i));
        self.kept = made.collect::<Option<_>>()?;
        let used: usize = self.kept.len() * NAMES.len();
        (used == arrays.len()).then_some(())
    }
}

/// Returns the index of a step among the steps that use the same replies. These are `iterations`
/// updates of `batches` steps each.
fn position(step: u64, batches: u64, iterations: u64) -> u64 {
    step % (batches.max(1) * iterations.max(1))
}

const NAMES: [&str; 6] = ["advantages", "from", "ids", "lengths", "old", "reward"];

fn arrays(made: &Rollouts) -> mlx_rs_core::Result<Vec<(&'static str, Array)>> {
    let replies = &made.replies;
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let each = |f: &dyn Fn(&Rollout) -> usize| -> mlx_rs_core::Result<Array> {
        let numbers: Vec<u32> = replies.iter().map(|one| number(f(one))).collect();
        Array::vector(&numbers)
    };
    let gains: Vec<f32> = replies.iter().map(|one| one.advantage).collect();
    let ids: Vec<u32> = replies
        .iter()
        .flat_map(|one| one.reply.ids.clone())
        .collect();
    let old = replies.iter().flat_map(|one| one.old_logprobs.clone());
    let old: Vec<f32> = old.flatten().collect();
    Ok(vec![
        ("advantages", Array::vector(&gains)?),
        ("from", each(&|one| one.reply.from)?),
        ("ids", Array::vector(&ids)?),
        ("lengths", each(&|one| one.reply.ids.len())?),
        ("old", Array::vector(&old)?),
        ("reward", Array::vector(&[made.reward, made.reward_std])?),
    ])
}

fn from_arrays(arrays: &Params, i: usize) -> Option<Rollouts> {
    let get = |name: &str| arrays.get(&format!("{i}/{name}"));
    let floats = |name: &str| get(name)?.to_vec::<f32>().ok();
    let numbers = |name: &str| get(name)?.to_vec::<u32>().ok();
    let (gains, old, reward) = (floats("advantages")?, floats("old")?, floats("reward")?);
    let (from, ids, lengths) = (numbers("from")?, numbers("ids")?, numbers("lengths")?);
    if from.len() != lengths.len() || gains.len() != lengths.len() {
        return None;
    }
    let (mut ids, mut old) = (ids.as_slice(), old.as_slice());
    let mut replies = Vec::with_capacity(lengths.len());
    for ((&length, &from), &advantage) in lengths.iter().zip(&from).zip(&gains) {
        let (own, others) = ids.split_at_checked(usize::try_from(length).ok()?)?;
        let reply = Sequence::new(own.to_vec()).with_prompt(usize::try_from(from).ok()?);
        let (logprobs, later) = old.split_at_checked(reply.learned())?;
        (ids, old) = (others, later);
        replies.push(Rollout {
            reply,
            advantage,
            old_logprobs: Some(logprobs.to_vec()),
        });
    }
    let [reward, reward_std] = reward.try_into().ok()?;
    let is_whole = ids.is_empty() && old.is_empty();
    is_whole.then_some(Rollouts {
        replies,
        reward,
        reward_std,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_as_they_were_written() {
        let reply = |ids: &[u32], from, old: &[f32]| Rollout {
            reply: Sequence::new(ids.to_vec()).with_prompt(from),
            advantage: -0.5,
            old_logprobs: Some(old.to_vec()),
        };
        let made = Rollouts {
            replies: vec![
                reply(&[1, 2, 3, 4], 2, &[-0.5, -0.25]),
                reply(&[7, 8], 1, &[-3.0]),
            ],
            reward: 0.5,
            reward_std: 0.25,
        };
        let written: Params = arrays(&made)
            .unwrap()
            .into_iter()
            .map(|(name, array)| (format!("0/{name}"), array))
            .collect();
        assert_eq!(written.len(), NAMES.len());
        let mut replies = Replies::default();
        replies.restore(&written).unwrap();
        assert_eq!(replies.kept[0].replies, made.replies);
        assert_eq!(replies.kept[0].reward_std, 0.25);

        for name in NAMES {
            let mut short = written.clone();
            short.insert(format!("0/{name}"), Array::vector(&[1u32]).unwrap());
            assert_eq!(replies.restore(&short), None, "{name}");
            short.remove(&format!("0/{name}"));
            assert_eq!(replies.restore(&short), None, "{name}");
        }
    }

    #[test]
    fn each_update_uses_the_same_batches() {
        let places: Vec<u64> = (0..8).map(|step| position(step, 2, 3)).collect();
        assert_eq!(places, [0, 1, 2, 3, 4, 5, 0, 1]);
    }
}
