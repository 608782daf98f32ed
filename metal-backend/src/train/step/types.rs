//! Inputs, options and reports of a training step.

use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::train::optim::OptimizerConfig;
use crate::train::schedule::Schedule;

/// A training sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The index of the first target; earlier tokens are the prompt. At least 1, because nothing
    /// predicts the first token.
    pub from: usize,
}

impl Sequence {
    /// Creates a sequence in which all tokens except the first are targets.
    #[must_use]
    pub fn new(ids: Vec<u32>) -> Self {
        Self { ids, from: 1 }
    }

    /// Excludes the first `n` tokens, the prompt, from the targets.
    #[must_use]
    pub fn with_prompt(mut self, n: usize) -> Self {
        self.from = n.max(1);
        self
    }

    /// The number of targets.
    #[must_use]
    pub fn learned(&self) -> usize {
        self.ids.len().saturating_sub(self.from.max(1))
    }
}

/// A better and a worse reply to one prompt. Each sequence begins with the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// The better reply.
    pub chosen: Sequence,
    /// The worse reply.
    pub rejected: Sequence,
}

/// A reply to a prompt, with a verdict. The sequence begins with the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JudgedReply {
    /// The prompt and the reply.
    pub reply: Sequence,
    /// Whether the reply is a good one.
    pub desirable: bool,
}

/// A generated reply and its advantage. The sequence begins with the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    /// The prompt and the reply.
    pub reply: Sequence,
    /// The advantage; positive for a reply that is better than the mean of its group.
    pub advantage: f32,
    /// The log-probabilities of the reply's tokens under the model that generated it, at the
    /// temperature of generation. `None` means that the current model generated the reply.
    pub old_logprobs: Option<Vec<f32>>,
}

/// The token ids of an anchor, of a positive that belongs to it, and of negatives that do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelatedTexts {
    /// The text, such as a question.
    pub anchor: Vec<u32>,
    /// The text that belongs to the anchor, such as the answer.
    pub positive: Vec<u32>,
    /// Texts that do not belong to the anchor.
    pub negatives: Vec<Vec<u32>>,
}

impl RelatedTexts {
    /// The texts.
    pub fn texts(&self) -> impl Iterator<Item = &Vec<u32>> {
        [&self.anchor, &self.positive]
            .into_iter()
            .chain(&self.negatives)
    }

    /// The number of tokens in all texts.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.texts().map(Vec::len).sum()
    }
}

/// Options of training steps.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate at each step.
    pub schedule: Schedule,
    /// The number of batches whose gradients are averaged for one update; at least 1.
    pub accumulation: usize,
    /// The maximum global norm of gradients.
    pub clip: Option<f32>,
    /// Whether blocks are recomputed in the backward pass, which needs less memory and more time.
    pub checkpoint: bool,
    /// Whether a step is traced once per batch shape and then replayed.
    pub compile: Compile,
    /// The seed of the adapter's initial values and of dropout.
    pub seed: u64,
}

impl Default for Tuning {
    /// AdamW at a constant rate of 1e-5, without accumulation, clipping and checkpointing. Steps
    /// are compiled on a GPU.
    fn default() -> Self {
        Self {
            optimizer: OptimizerConfig::adamw(),
            schedule: Schedule::constant(1e-5),
            accumulation: 1,
            clip: None,
            checkpoint: false,
            compile: Compile::Auto,
            seed: 0,
        }
    }
}

/// The result of a training step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Mean loss of the batch, before the update.
    pub loss: f32,
    /// Target tokens in the batch.
    pub tokens: usize,
    /// The global norm of gradients, if they are clipped and an update was made.
    pub norm: Option<f32>,
    /// The learning rate of the step.
    pub rate: f32,
    /// Whether the parameters were updated. Otherwise the gradients were accumulated.
    pub updated: bool,
    /// The report of a batch of preferences.
    pub preference: Option<PreferenceReport>,
    /// The report of a batch of generated replies.
    pub policy: Option<PolicyReport>,
}

/// The rewards of a batch of generated replies, before the update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PolicyReport {
    /// Mean reward.
    pub reward: f32,
    /// Mean over the prompts of the standard deviation of rewards.
    pub reward_std: f32,
    /// Mean divergence from the base model per token, in nats; `None` if `beta` is 0.
    pub kl: Option<f32>,
    /// Fraction of tokens whose probability ratio is clipped; `None` if all ratios are 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_ratio: Option<f32>,
    /// Mean number of tokens of a reply.
    pub completion_length: f32,
}

/// The rewards of a batch of preferences, before the update. A reward is `beta` times the reply's
/// log-probability minus that of the base model. With odds ratios, it is `beta` times the mean
/// log-probability per token. A mean over no replies is 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    /// Mean reward of the better or desirable replies.
    pub chosen: f32,
    /// Mean reward of the worse or undesirable replies.
    pub rejected: f32,
    /// Fraction of pairs whose better reply has the greater reward. For single replies: the
    /// fraction of desirable replies above and undesirable replies below the reference point.
    pub accuracy: f32,
}

/// The evaluation of a model on pairs of replies, single replies with verdicts, or texts that
/// belong together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ItemEvaluation {
    /// Sum of the losses of all examples.
    pub loss: f64,
    /// The number of examples.
    pub items: usize,
    /// The number of correct examples: the better reply has the greater reward, or the positive is
    /// the most similar candidate.
    pub correct: usize,
    /// The number of tokens.
    pub tokens: usize,
}

/// The evaluation of a model on some sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the cross-entropy of all targets, in nats.
    pub loss: f64,
    /// The number of targets.
    pub tokens: usize,
    /// The number of targets that have the greatest logit.
    pub correct: usize,
}

/// Whether a step is compiled: traced once per batch shape, and replayed for other batches of this
/// shape.
///
/// The shape is the list of the sequences' lengths. On a GPU, element-wise operations are fused
/// into one kernel, so results round differently. On a CPU, the graph is simplified and cached, and
/// results are equal; fusion there would need a C++ compiler at run time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compile {
    /// Compiled on a GPU, not on a CPU.
    #[default]
    Auto,
    /// Always compiled.
    On,
    /// Never compiled.
    Off,
}

impl Compile {
    /// Whether steps are compiled for the model of `engine`.
    pub(super) fn on(self, engine: &Engine) -> bool {
        match self {
            Self::Auto => !engine.is_on_cpu(),
            Self::On => true,
            Self::Off => false,
        }
    }
}
