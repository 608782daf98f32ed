//! Measured times of each part of a decode step.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::Result;
use crate::message::Prompt;
use crate::options::GenerateOptions;

/// A part of a decode step.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPart {
    /// The embedding of token ids.
    Embedding,
    /// Norms, and residual additions that are not fused into a matrix multiplication.
    Norm,
    /// The projections of queries, keys and values.
    Qkv,
    /// Norms and rotation of queries and keys, the KV cache, scores, softmax and the sum of values.
    Attention,
    /// The output projection of attention.
    Output,
    /// The whole mixer of a layer without plain attention, such as a recurrent mixer, with the norm
    /// before it.
    Mixer,
    /// The feed-forward part: dense, or a mixture of experts.
    Mlp,
    /// Inputs and factors that only some model families have.
    Extra,
    /// The last norm and the head, which computes logits.
    Head,
    /// Logits processors and sampling.
    Sampling,
    /// Cache updates and all other work of the step.
    Rest,
}

impl StepPart {
    /// All parts, in the order of a step.
    pub const ALL: [StepPart; 11] = [
        StepPart::Embedding,
        StepPart::Norm,
        StepPart::Qkv,
        StepPart::Attention,
        StepPart::Output,
        StepPart::Mixer,
        StepPart::Mlp,
        StepPart::Extra,
        StepPart::Head,
        StepPart::Sampling,
        StepPart::Rest,
    ];

    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StepPart::Embedding => "embedding",
            StepPart::Norm => "norm",
            StepPart::Qkv => "qkv",
            StepPart::Attention => "attention",
            StepPart::Output => "output",
            StepPart::Mixer => "mixer",
            StepPart::Mlp => "mlp",
            StepPart::Extra => "extra",
            StepPart::Head => "head",
            StepPart::Sampling => "sampling",
            StepPart::Rest => "rest",
        }
    }
}

impl fmt::Display for StepPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The time of one part of one layer.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PartTime {
    /// The layer; `None` for parts outside the layers.
    pub layer: Option<usize>,
    /// The part.
    pub part: StepPart,
    /// The mean seconds per step.
    pub seconds: f64,
}

impl PartTime {
    /// The time of one part.
    #[must_use]
    pub fn new(layer: Option<usize>, part: StepPart, seconds: f64) -> Self {
        Self {
            layer,
            part,
            seconds,
        }
    }
}

/// The times of a decode step. Each part is evaluated before the next one starts, so times do not
/// overlap. An ordinary step fuses operations across parts and is therefore faster; see
/// [`plain_step_seconds`](Self::plain_step_seconds).
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepProfile {
    /// The number of measured steps.
    pub steps: usize,
    /// Positions in the caches before the first measured step.
    pub context: usize,
    /// The mean wall-clock time of a measured step; equals the sum of [`Self::parts`].
    pub step_seconds: f64,
    /// The mean time of an ordinary step at the same positions.
    pub plain_step_seconds: f64,
    /// The tokens in order; ordinary and measured steps alternate.
    pub tokens: Vec<u32>,
    /// The parts, sorted by layer, then by order in a step; parts outside the layers come first.
    pub parts: Vec<PartTime>,
}

impl StepProfile {
    /// The seconds of a part, summed over all layers.
    #[must_use]
    pub fn total(&self, part: StepPart) -> f64 {
        let times = self.parts.iter().filter(|time| time.part == part);
        times.map(|time| time.seconds).sum()
    }

    /// The seconds of all parts.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.parts.iter().map(|time| time.seconds).sum()
    }
}

/// A model that can profile its decode steps.
pub trait ProfiledModel: TextModel {
    /// Runs `prompt`, and then decodes with the options' sampling. [`GenerateOptions::max_tokens`]
    /// measured steps alternate with as many ordinary steps. Generation does not stop early, and no
    /// cache is kept. `interrupt` can end the call.
    ///
    /// # Errors
    /// As [`TextModel::generate`], and [`Interrupt::check`];
    /// [`crate::ErrorKind::Unsupported`] for options that change the network, such as steering.
    fn profile_steps(
        &self,
        prompt: &Prompt,
        options: &GenerateOptions,
        interrupt: &Interrupt,
    ) -> Result<StepProfile>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_added_over_layers() {
        let profile = StepProfile {
            parts: vec![
                PartTime::new(None, StepPart::Head, 4.0),
                PartTime::new(Some(0), StepPart::Mlp, 1.0),
                PartTime::new(Some(1), StepPart::Mlp, 2.0),
            ],
            ..StepProfile::default()
        };
        assert_eq!(profile.total(StepPart::Mlp), 3.0);
        assert_eq!(profile.total(StepPart::Norm), 0.0);
        assert_eq!(profile.sum(), 7.0);
    }

    #[test]
    fn each_part_has_the_name_that_json_has() {
        for part in StepPart::ALL {
            let json = serde_json::to_value(part).unwrap();
            assert_eq!(json, part.name());
        }
        let mut sorted = StepPart::ALL;
        sorted.sort_unstable();
        assert_eq!(sorted, StepPart::ALL);
    }
}
