//! Steps on replies that the model generated, with advantages: group relative policy optimization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{All, Array};

use super::packed::{Packed, check};
use super::{PolicyReport, Rollout, Sequence, StepReport, Trainer};
use crate::error::engine;
use crate::nn::adapter::{Scope, within};
use crate::train::loss::{Grpo, LossType, policy};

impl Trainer {
    /// Trains on replies that the model generated with its current parameters, by [`policy`].
    ///
    /// # Errors
    /// As [`Self::step`]; also [`ErrorKind::Unsupported`] if several processes train together, and
    /// [`ErrorKind::InvalidOption`] for an advantage that is not finite.
    pub fn step_by_policy(&mut self, batch: &[Rollout], options: Grpo) -> Result<StepReport> {
        let bad = |message: String| Error::new(ErrorKind::InvalidOption, message);
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
        let tokens = batch.iter().map(|one| one.reply.learned()).sum();
        let loaded = Arc::clone(&self.engine);
        let decoder = loaded.decoder()?;
        let (packed, weights, base) = loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let packed = Packed::new(batch.iter().map(|one| &one.reply))?
                    .with_temperature(options.temperature);
                let weights = Weights::new(batch, options)?;
                // Without a penalty, the base model is not needed.
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
                let advantages = &weights.advantages;
                let (losses, divergence) = policy(&each, base.as_ref(), advantages, options.beta)?;
                let loss = losses.multiply(&weights.tokens)?.sum(All, false)?;
                let divergence = divergence.map(|d| {
                    let sum = d.multiply(&packed.mask)?.sum(All, false)?;
                    sum.divide(&packed.mask.sum(All, false)?)
                });
                Ok((loss, divergence.transpose()?.into_iter().collect()))
            })
        })?;
        let divergence = self
            .engine
            .scope(|| more.first().map(Array::item::<f32>).transpose())
            .map_err(engine("divergence"))?;
        report.policy = Some(PolicyReport {
            reward: 0.0,
            reward_std: 0.0,
            kl: divergence,
            completion_length: tokens as f32 / batch.len().max(1) as f32,
        });
        Ok(report)
    }
}

/// The advantage and the weight of each position of packed replies, `[1, T]`. Weights of positions
/// that are no targets are 0.
struct Weights {
    advantages: Array,
    tokens: Array,
}

impl Weights {
    fn new(batch: &[Rollout], options: Grpo) -> mlx_rs_core::Result<Self> {
        let replies = batch.len().max(1) as f32;
        let all: usize = batch.iter().map(|one| one.reply.learned()).sum();
        let (mut advantages, mut tokens) = (Vec::new(), Vec::new());
        for Rollout { reply, advantage } in batch {
            let weight = match options.loss_type {
                LossType::Grpo => 1.0 / (replies * reply.learned().max(1) as f32),
                LossType::Bnpo | LossType::Dapo => 1.0 / all.max(1) as f32,
                LossType::DrGrpo => 1.0 / (replies * options.max_completion_length.max(1) as f32),
            };
            for at in 1..reply.ids.len() {
                advantages.push(*advantage);
                tokens.push(if is_target(reply, at) { weight } else { 0.0 });
            }
        }
        let row = |values: &[f32]| Array::vector(values)?.expand_dims(0);
        Ok(Self {
            advantages: row(&advantages)?,
            tokens: row(&tokens)?,
        })
    }
}

fn is_target(reply: &Sequence, at: usize) -> bool {
    at >= reply.from
}
