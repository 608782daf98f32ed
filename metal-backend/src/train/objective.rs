//! The objective of a run: a training method with its parameters. An encoder gets another method
//! than a decoder.

use inference::{Error, ErrorKind, Result};

use super::config::{BatchOrder, Method, ScaleRewards, TrainConfig};
use super::loss::{Grpo, Kto};
use super::rollout::Sampling;
use crate::engine::Engine;

/// A training method with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// Cross-entropy on texts and replies.
    Sft,
    /// Direct preference optimization.
    Dpo {
        /// The weight of the deviation from the base model; above 0.
        beta: f32,
        /// The assumed fraction of wrongly ordered pairs; from 0 to below 0.5.
        label_smoothing: f32,
    },
    /// Odds ratio preference optimization.
    Orpo {
        /// The weight of the odds ratio; above 0.
        beta: f32,
        /// Whether the cross-entropy of the better replies also covers the prompts.
        learn_prompt: bool,
    },
    /// Kahneman-Tversky optimization.
    Kto(Kto),
    /// Group relative policy optimization on replies that the model generates.
    Grpo(Grpo, Sampling),
    /// Similarity of texts that belong together ([`super::loss::contrastive`]).
    Contrastive {
        /// The factor on cosine similarities; above 0.
        scale: f32,
    },
}

impl Objective {
    /// Returns the error for examples that do not fit the objective. A run never causes this error.
    pub(super) fn mismatch(self, examples: &str) -> Error {
        let message = format!("{self:?} is not trained on {examples}");
        Error::new(ErrorKind::InvalidOption, message)
    }
}

impl TrainConfig {
    /// Returns the method with its parameters.
    #[must_use]
    pub fn objective(&self) -> Objective {
        match self.method {
            Method::Sft => Objective::Sft,
            Method::Dpo => Objective::Dpo {
                beta: self.beta(),
                label_smoothing: self.label_smoothing,
            },
            Method::Orpo => Objective::Orpo {
                beta: self.beta(),
                learn_prompt: !self.mask_prompt,
            },
            Method::Kto => Objective::Kto(Kto {
                beta: self.beta(),
                desirable_weight: self.desirable_weight,
                undesirable_weight: self.undesirable_weight,
            }),
            Method::Grpo => Objective::Grpo(
                self.grpo(),
                Sampling {
                    num_generations: self.num_generations,
                    top_p: self.top_p,
                    scale_rewards: self.scale_rewards == ScaleRewards::Group,
                    num_iterations: self.num_iterations,
                },
            ),
            Method::Contrastive => Objective::Contrastive {
                scale: self.similarity_scale,
            },
        }
    }

    /// Returns `beta`, or its default for the method.
    pub(super) fn beta(&self) -> f32 {
        let default = if self.method == Method::Grpo {
            0.0
        } else {
            0.1
        };
        self.beta.unwrap_or(default)
    }

    /// Returns the parameters of [`Objective::Grpo`].
    pub(super) fn grpo(&self) -> Grpo {
        Grpo {
            beta: self.beta(),
            temperature: self.temperature,
            loss_type: self.loss_type,
            max_completion_length: self.max_completion_length,
            epsilon: self.epsilon,
            epsilon_high: self.epsilon_high.unwrap_or(self.epsilon),
        }
    }

    /// Sets options that were not given and depend on the kind of model. An encoder is trained by
    /// similarity, with batches that are shuffled in each epoch.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the method does not train this kind of model;
    /// [`ErrorKind::InvalidOption`] if the method contradicts other options.
    pub(super) fn settle(&mut self, engine: &Engine) -> Result<()> {
        let is_encoder = engine.is_encoder()?;
        let name = &engine.info().architecture;
        if is_encoder && self.method == Method::Sft && !self.given.method {
            self.method = Method::Contrastive;
        }
        match (is_encoder, self.method) {
            (true, Method::Contrastive) => {
                if !self.given.batch_order && !self.keep_order {
                    self.batch_order = BatchOrder::Random;
                }
                self.validate()
            }
            (false, Method::Contrastive) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "method contrastive trains encoders, and {name} is a decoder; use another \
                     method, or an encoder such as bert"
                ),
            )),
            (true, method) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{name} is an encoder, which predicts no next token, so method {} cannot \
                     train it; use method contrastive, with lines of \"anchor\" and \"positive\"",
                    method.name()
                ),
            )),
            (false, _) => self.check_unused(),
        }
    }
}
