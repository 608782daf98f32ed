//! Progress events of a run, and its result.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::step::StepReport;
use super::train_log::{Score, TrainReport};

/// A progress event of a run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A batch was processed.
    Step {
        /// Batches processed so far.
        step: u64,
        /// The number of batches in the whole run.
        iters: u64,
        /// The result of the step.
        report: &'a StepReport,
        /// Target tokens per second since the last report.
        tokens_per_second: f64,
        /// Device memory in use, in bytes.
        memory: u64,
    },
    /// The mean loss since the last report.
    Train(&'a TrainReport),
    /// Progress of a validation or test.
    Judging {
        /// The number of finished batches.
        done: u64,
        /// The total number of batches.
        total: u64,
    },
    /// A validation has finished.
    Validation(&'a Score),
    /// The test has finished.
    Test(&'a Score),
    /// The last validation had the lowest loss so far, and the adapter was written to disk.
    Best {
        /// Batches processed so far.
        step: u64,
        /// The directory of the best adapter.
        dir: &'a Path,
    },
    /// The run ends early, because validations have not lowered the loss enough for too long
    /// ([`super::config::TrainConfig::early_stopping_patience`]).
    StoppedEarly {
        /// Batches processed so far.
        step: u64,
    },
    /// The adapter and the resume state were written to disk.
    Saved {
        /// Batches processed so far.
        step: u64,
        /// The directory of the adapter.
        dir: &'a Path,
    },
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Batches processed, including those of earlier sessions of a resumed run.
    pub step: u64,
    /// Whether the run was cancelled before its last step.
    pub interrupted: bool,
    /// Whether the run ended early ([`Event::StoppedEarly`]).
    pub stopped_early: bool,
    /// The validation with the lowest loss, except the validation before the first step. Its
    /// adapter is in [`super::run_dir::BEST_DIR`].
    pub best: Option<BestScore>,
    /// The loss in the last report.
    pub train_loss: Option<f64>,
    /// The score of the validation before the first step.
    pub base: Option<Score>,
    /// The score of the last validation.
    pub validation: Option<Score>,
    /// The score of the test.
    pub test: Option<Score>,
    /// Target tokens processed.
    pub trained_tokens: u64,
    /// The number of trainable parameters.
    pub trainable_parameters: usize,
    /// Seconds of training, without validations and saves.
    pub seconds: f64,
    /// Peak device memory, in bytes.
    pub peak_memory: u64,
}

impl Summary {
    /// The result as a JSON object, as `mlx train --json` prints it. `adapter_path` is the
    /// directory of the adapter.
    #[must_use]
    pub fn to_json(&self, adapter_path: &Path) -> Value {
        json!({
            "adapter_path": adapter_path,
            "steps": self.step,
            "interrupted": self.interrupted,
            "stopped_early": self.stopped_early,
            "best": self.best.as_ref().map(|best| json!({
                "step": best.step,
                "loss": best.loss,
                "adapter_path": best.adapter_path,
            })),
            "train_loss": self.train_loss,
            "base": self.base.as_ref().map(Score::to_json),
            "validation": self.validation.as_ref().map(Score::to_json),
            "test": self.test.as_ref().map(Score::to_json),
            "trained_tokens": self.trained_tokens,
            "trainable_parameters": self.trainable_parameters,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
        })
    }
}

/// The validation with the lowest loss.
#[derive(Debug, Clone, PartialEq)]
pub struct BestScore {
    /// Batches processed before the validation.
    pub step: u64,
    /// The loss of the validation.
    pub loss: f64,
    /// The directory of the adapter that was validated.
    pub adapter_path: PathBuf,
}
