//! Training steps on generated replies with advantages: group relative policy optimization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{All, Array};

use super::packed::{Packed, check};
use super::{PolicyReport, Rollout, Sequence, StepReport, Trainer};
use crate::error::engine;
use crate::nn::adapter::{Scope, within};
use crate::train::loss::{Grpo, LossType, policy};

impl Trainer {
    /// Trains on generated replies by [`policy`]. If replies have no
    /// [`old_logprobs`](Rollout::old_logprobs), the current parameters must have generated them,
    /// and this call stores their log-probabilities in the batch. So later calls with the same
    /// batch are further updates on the same replies.
    ///
    /// # Errors
    /// The errors of [`Self::step`]; also [`ErrorKind::Unsupported`] if several processes train
    /// together, and [`ErrorKind::InvalidOption`] for an advantage that is not finite, or for old
    /// log-probabilities that do not fit the replies or that only some replies have.
    pub fn step_by_policy(&mut self, batch: &mut [Rollout], options: Grpo) -> Result<StepReport> {
        if self.together.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "generated replies are trained by one process",
            ));
        }
        options.check().map_err(bad)?;
        if let Some(one) = batch.iter().find(|one| !one.advantage.is_finite()) {
            return Err(bad(format!("an advantage is {}", one.advantage)));
        }
        check(&self.engine, batch.iter().map(|one| &one.reply))?;
        let has_old = check_old(batch)?;
        let tokens = batch.iter().map(|one| one.reply.learned()).sum();
        let loaded = Arc::clone(&self.engine);
        let decoder = loaded.decoder()?;
        let (packed, weights, base) = loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let packed = Packed::new(batch.iter().map(|one| &one.reply))?
                    .with_temperature(options.temperature);
                let weights = Weights::new(batch, options)?;
                // The base model is needed only for the divergence penalty.
                let base = match options.beta {
                    0.0 => None,
                    _ => Some(packed.base_each(decoder.as_ref())?),
                };
                Ok((packed, weights, base))
            })
            .map_err(engine("batch"))?;
        let scope = self.scope_of_batch();
        let (mut report, more) = self.step_by(tokens, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            within(Arc::new(scope), || {
                let each = packed.each(decoder.as_ref())?;
                let Weights {
                    advantages,
                    tokens,
                    old,
                } = &weights;
                let got = policy(&each, old.as_ref(), base.as_ref(), advantages, options)?;
                let loss = got.losses.multiply(tokens)?.sum(All, false)?;
                let mean = |each: Array| {
                    let sum = each.multiply(&packed.mask)?.sum(All, false)?;
                    sum.divide(&packed.mask.sum(All, false)?)
                };
                // The first result is the fraction of clipped tokens if there are old
                // log-probabilities. Otherwise nothing is clipped, and the first result is the
                // log-probabilities, which are stored below.
                let first = match got.clipped {
                    Some(clipped) => mean(clipped)?,
                    None => each.stop_gradient()?,
                };
                let kl = got.kl.map(mean).transpose()?;
                Ok((loss, [Some(first), kl].into_iter().flatten().collect()))
            })
        })?;
        let (clip_ratio, each, kl) = self
            .engine
            .scope(|| -> mlx_rs_core::Result<_> {
                let kl = more.get(1).map(Array::item::<f32>).transpose()?;
                Ok(match (more.first(), has_old) {
                    (Some(clipped), true) => (Some(clipped.item::<f32>()?), Vec::new(), kl),
                    (Some(each), false) => (None, each.to_f32_vec()?, kl),
                    (None, _) => (None, Vec::new(), kl),
                })
            })
            .map_err(engine("replies"))?;
        if !has_old {
            keep_old(batch, &each);
        }
        report.policy = Some(PolicyReport {
            reward: 0.0,
            reward_std: 0.0,
            kl,
            clip_ratio,
            completion_length: tokens as f32 / batch.len().max(1) as f32,
        });
        Ok(report)
    }
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Whether the replies have old log-probabilities. Checks that they fit the replies.
fn check_old(batch: &[Rollout]) -> Result<bool> {
    let have = batch.iter().filter(|one| one.old_logprobs.is_some());
    let have = have.count();
    if have != 0 && have != batch.len() {
        return Err(bad(format!(
            "{have} of {} replies have old log-probabilities; give them for all or for none",
            batch.len()
        )));
    }
    for (i, one) in batch.iter().enumerate() {
        let Some(old) = &one.old_logprobs else {
            continue;
        };
        if old.len() != one.reply.learned() {
            return Err(bad(format!(
                "reply {i} has {} old log-probabilities for {} tokens",
                old.len(),
                one.reply.learned()
            )));
        }
        if let Some(wrong) = old.iter().find(|p| !p.is_finite()) {
            return Err(bad(format!(
                "an old log-probability of reply {i} is {wrong}"
            )));
        }
    }
    Ok(have > 0)
}

/// Stores in each reply its share of the log-probabilities of the packed replies.
fn keep_old(batch: &mut [Rollout], each: &[f32]) {
    let mut rest = each;
    for one in batch {
        let inputs = one.reply.ids.len().saturating_sub(1).min(rest.len());
        let (own, others) = rest.split_at(inputs);
        rest = others;
        let from = inputs - one.reply.learned().min(inputs);
        one.old_logprobs = own.get(from..).map(<[f32]>::to_vec);
    }
}

/// The advantage, the weight and the old log-probability of each position of packed replies, `[1,
/// T]`. Weights and log-probabilities are 0 at positions that are not targets.
struct Weights {
    advantages: Array,
    tokens: Array,
    old: Option<Array>,
}

impl Weights {
    fn new(batch: &[Rollout], options: Grpo) -> mlx_rs_core::Result<Self> {
        let replies = batch.len().max(1) as f32;
        let all: usize = batch.iter().map(|one| one.reply.learned()).sum();
        let (mut advantages, mut tokens, mut old) = (Vec::new(), Vec::new(), Vec::new());
        for one in batch {
            let Rollout {
                reply, advantage, ..
            } = one;
            let weight = match options.loss_type {
                LossType::Grpo => 1.0 / (replies * reply.learned().max(1) as f32),
                LossType::Bnpo | LossType::Dapo => 1.0 / all.max(1) as f32,
                LossType::DrGrpo => 1.0 / (replies * options.max_completion_length.max(1) as f32),
            };
            for at in 1..reply.ids.len() {
                advantages.push(*advantage);
                tokens.push(if is_target(reply, at) { weight } else { 0.0 });
            }
            if let Some(own) = &one.old_logprobs {
                let given = reply.ids.len().saturating_sub(1 + own.len());
                old.extend(std::iter::repeat_n(0.0, given).chain(own.iter().copied()));
            }
        }
        let row = |values: &[f32]| Array::vector(values)?.expand_dims(0);
        Ok(Self {
            advantages: row(&advantages)?,
            tokens: row(&tokens)?,
            old: (!old.is_empty()).then(|| row(&old)).transpose()?,
        })
    }
}

fn is_target(reply: &Sequence, at: usize) -> bool {
    at >= reply.from
}
