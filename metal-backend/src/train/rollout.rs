//! Generates replies to prompts during training, judges them, and computes their advantages.

use std::collections::BTreeMap;
use std::sync::Arc;

use inference::{
    BatchEvent, BatchSession as _, Error, ErrorKind, FinishReason, GenerateOptions, RequestId,
    Result, StopCause,
};

use super::dataset::PromptLine;
use super::loss::{Grpo, group_advantages};
use super::reward::{Completion, Reward};
use super::step::{Rollout, Sequence};
use crate::engine::Engine;
use crate::generate::Batch;

/// How replies are generated and compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The number of replies to each prompt; at least 2.
    pub num_generations: usize,
    /// The probability mass of the tokens that can be drawn; 1 for all.
    pub top_p: f32,
    /// Whether advantages are divided by the standard deviation of their group's rewards.
    pub scale_rewards: bool,
    /// The number of updates that use the same replies; at least 1.
    pub num_iterations: u64,
}

/// The judged replies of a batch.
pub(super) struct Rollouts {
    /// The replies; replies to the same prompt are adjacent.
    pub replies: Vec<Rollout>,
    /// Mean reward.
    pub reward: f32,
    /// Mean standard deviation of the rewards of a prompt.
    pub reward_std: f32,
}

/// The maximum number of requests that run together.
const TOGETHER: usize = 32;

/// Generates replies to prompts with the current model, and judges them. All random numbers derive
/// from `seed`.
///
/// # Errors
/// If the engine fails, or the replies cannot be judged.
pub(super) fn rollouts(
    engine: &Arc<Engine>,
    prompts: &[&PromptLine],
    (grpo, sampling): (Grpo, Sampling),
    seed: u64,
    reward: &mut dyn Reward,
) -> Result<Rollouts> {
    let group = sampling.num_generations.max(1);
    let wanted: Vec<&PromptLine> = prompts
        .iter()
        .flat_map(|prompt| std::iter::repeat_n(*prompt, group))
        .collect();
    let options = GenerateOptions::new()
        .with_max_tokens(grpo.max_completion_length)
        .with_temperature(grpo.temperature)
        .with_top_p(sampling.top_p);
    let generated = generate(engine, &wanted, &options, seed)?;
    let tokenizer = engine.text().tokenizer();
    let completions = wanted
        .iter()
        .zip(generated)
        .map(|(prompt, (ids, end))| {
            let text = tokenizer.decode(&ids)?;
            Ok(Completion {
                line: prompt.line.clone(),
                text,
                is_truncated: end.is_none(),
                ids: ids.into_iter().chain(end).collect(),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let rewards = reward.rewards(&completions)?;
    if rewards.len() != completions.len() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "the reward returned {} values for {} replies",
                rewards.len(),
                completions.len()
            ),
        ));
    }
    if let Some(wrong) = rewards.iter().find(|reward| !reward.is_finite()) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("a reward is {wrong}; rewards must be finite numbers"),
        ));
    }
    let (advantages, reward_std) = group_advantages(&rewards, group, sampling.scale_rewards);
    let replies = wanted
        .iter()
        .zip(&completions)
        .zip(advantages)
        .map(|((prompt, completion), advantage)| Rollout {
            reply: Sequence::new([prompt.ids.as_slice(), &completion.ids].concat())
                .with_prompt(prompt.ids.len()),
            advantage,
            old_logprobs: None,
        })
        .collect();
    Ok(Rollouts {
        replies,
        reward: rewards.iter().sum::<f32>() / rewards.len().max(1) as f32,
        reward_std,
    })
}

/// A reply: its ids, and the id of the token that ended it.
type Reply = (Vec<u32>, Option<u32>);

fn generate(
    engine: &Arc<Engine>,
    prompts: &[&PromptLine],
    options: &GenerateOptions,
    seed: u64,
) -> Result<Vec<Reply>> {
    let mut batch = Batch::new(Arc::clone(engine));
    let mut replies: Vec<Reply> = vec![Reply::default(); prompts.len()];
    let mut places: BTreeMap<RequestId, usize> = BTreeMap::new();
    let mut waiting = prompts.iter().enumerate();
    loop {
        while batch.len() < TOGETHER
            && let Some((i, prompt)) = waiting.next()
        {
            // Each reply needs its own seed, because equal seeds give equal replies to a prompt.
            let own = seed.wrapping_add((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let options = options.clone().with_seed(own);
            places.insert(batch.add_ids(prompt.ids.clone(), &options)?, i);
        }
        if batch.is_empty() {
            return Ok(replies);
        }
        for event in batch.step()? {
            let Some(&i) = places.get(&event.row()) else {
                continue;
            };
            match event {
                BatchEvent::Token { token, .. } => replies[i].0.push(token.id),
                BatchEvent::Done { reason, stop, .. } => match (reason, stop) {
                    (_, Some(StopCause::Eos(id) | StopCause::Token(id))) => {
                        replies[i].1 = Some(id);
                    }
                    (FinishReason::Length, _) => {}
                    (reason, _) => {
                        return Err(Error::new(
                            ErrorKind::Engine,
                            format!("a reply ended by {}", reason.as_str()),
                        ));
                    }
                },
                BatchEvent::Failed { error, .. } => return Err(error),
                _ => {}
            }
        }
    }
}
