//! What a step takes and what it tells: sequences, options and reports.

use serde::{Deserialize, Serialize};

use super::Compile;
use crate::train::optim::OptimizerConfig;
use crate::train::schedule::Schedule;

/// Tokens to learn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The first token that the model shall learn to say; those before are given. At least 1:
    /// nothing stands before the first.
    pub from: usize,
}

impl Sequence {
    /// Tokens of which all but the first are learned.
    #[must_use]
    pub fn new(ids: Vec<u32>) -> Self {
        Self { ids, from: 1 }
    }

    /// The same, with the first `n` as a prompt that is not learned.
    #[must_use]
    pub fn with_prompt(mut self, n: usize) -> Self {
        self.from = n.max(1);
        self
    }

    /// How many tokens are learned.
    #[must_use]
    pub fn learned(&self) -> usize {
        self.ids.len().saturating_sub(self.from.max(1))
    }
}

/// Two replies to one prompt, of which the first is better. Each begins with the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// The better.
    pub chosen: Sequence,
    /// The worse.
    pub rejected: Sequence,
}

/// How to train.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// What turns gradients into steps.
    pub optimizer: OptimizerConfig,
    /// Its learning rate.
    pub schedule: Schedule,
    /// Batches whose gradients are averaged before a step; at least 1.
    pub accumulation: usize,
    /// Gradients are scaled down to this norm, all of them together.
    pub clip: Option<f32>,
    /// Blocks are computed again in the backward pass: less memory, more time.
    pub checkpoint: bool,
    /// Whether a step is traced once for each form of its batch and replayed then.
    pub compile: Compile,
    /// What the adapter's start and dropout are drawn from.
    pub seed: u64,
}

impl Default for Tuning {
    /// AdamW at a constant rate of 1e-5, without accumulation, clipping and checkpoints, compiled
    /// on a GPU.
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

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Mean loss of the batch, before the step.
    pub loss: f32,
    /// Tokens that were learned from.
    pub tokens: usize,
    /// Norm of all gradients, where they are clipped and a step was made.
    pub norm: Option<f32>,
    /// The rate of the step.
    pub rate: f32,
    /// Whether parameters changed, rather than gradients being gathered for a later step.
    pub updated: bool,
    /// Of a batch of preferences.
    pub preference: Option<PreferenceReport>,
}

/// How a model stands to a batch of preferences, before the step. A reward is `beta` times how much
/// more likely the reply is than without the adapter, as a logarithm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    /// Mean reward of the better replies.
    pub chosen: f32,
    /// Mean reward of the worse.
    pub rejected: f32,
    /// Share of pairs whose better reply has the greater reward.
    pub accuracy: f32,
}

/// How well a model tells better replies from worse.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PreferenceEvaluation {
    /// Sum of the losses of all pairs.
    pub loss: f64,
    /// How many they are.
    pub pairs: usize,
    /// Pairs whose better reply has the greater reward.
    pub correct: usize,
    /// Tokens of replies.
    pub tokens: usize,
}

/// How wrong a model is on some sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the cross-entropy of all learned tokens, in nats.
    pub loss: f64,
    /// How many they are.
    pub tokens: usize,
    /// How many of them the model would have said.
    pub correct: usize,
}
