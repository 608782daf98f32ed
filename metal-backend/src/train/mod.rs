//! Fine-tuning: adapters on frozen models, gradients, losses, optimizers, the training step, and
//! the run. The caller displays the progress of a run.
//!
//! A [`Trainer`] has a loaded model with an adapter. Its trainable parameters are sorted by name,
//! and have the names that a checkpoint would use, such as
//! `model.layers.3.self_attn.q_proj.lora_a`. Each [`Trainer::step`] processes a batch of token
//! sequences. At the same time, the model serves requests with its current parameters through the
//! same engine.
//!
//! - `fuse.rs`: merging an adapter into its model;
//! - `loss.rs`, `optim.rs`, `schedule.rs`: formulas with their sources;
//! - [`dataset`]: JSONL files to token ids, loss masks and batches;
//! - [`config`]: the options of a run, from a YAML or TOML file; [`objective`]: its method;
//! - `step.rs`: a step, from sequences to updated parameters; `step/compiled.rs`: the same as a
//!   compiled graph;
//! - [`run`]: a whole run from its options to its files, with `plan.rs`,
//!   `begin.rs`, `progress.rs`, `run_dir.rs`, `settings.rs`, `state.rs` and [`train_log`];
//! - [`reward`]: judges generated replies; `rollout.rs` generates them, `replies.rs` trains on
//!   them;
//! - `together.rs`: data-parallel training by several processes;
//! - [`report`]: the metrics of a run in files that other programs read;
//! - [`evaluate`]: measures a model on data, with `scoring.rs`.

mod begin;
pub mod config;
pub mod dataset;
pub mod evaluate;
mod examples;
mod fuse;
pub mod loss;
pub mod objective;
pub mod optim;
pub mod plan;
mod progress;
mod replies;
pub mod report;
pub mod reward;
mod rollout;
pub mod run;
mod run_dir;
pub mod schedule;
mod scoring;
mod settings;
mod state;
mod step;
mod together;
pub mod train_log;

pub use crate::adapter::{AdapterKind, CONFIG_FILE, LoraAdapter, Params, WEIGHTS_FILE};
pub use fuse::{fuse, fuse_dequantized};
pub use objective::Objective;
pub use optim::{Optimizer, OptimizerConfig};
pub use reward::{Completion, Reward, RewardCommand};
pub use rollout::Sampling;
pub use run::{BestScore, Event, Run, Summary};
pub use run_dir::Start;
pub use schedule::Schedule;
pub use state::STATE_FILE;
pub use step::{
    Compile, Evaluation, ItemEvaluation, JudgedReply, PolicyReport, Preference, PreferenceReport,
    RelatedTexts, Rollout, Sequence, StepReport, Trainer, Tuning,
};
pub use together::Together;
