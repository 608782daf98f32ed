//! The options of a training run. A YAML or TOML file contains them, with the names of Python
//! mlx-lm's `lora` config.
//!
//! Each option is declared once, in this file. `read.rs` reads files, `check.rs` validates, and
//! [`TrainOption`] makes the flags of the command line. The options are mlx-lm's, except these:
//! `pack`, `keep_order`, `skip_bad_lines`, `batch_order`, `backend`, `dtype`, `max_grad_norm`,
//! `compile`, and `method` with the options of its methods.

use std::collections::BTreeMap;
use std::path::PathBuf;

use inference::{ComputeType, Error, ErrorKind};
use serde::{Deserialize, Serialize};

use super::Compile;
use super::dataset::{BatchOptions, DataOptions, FieldNames, Order};
use super::loss::LossType;
use super::report::Report;
use OptionGroup::{Adapter, Data, Files, General, Reports, Steps};
use option::{Flag, OptionValue, option, options};

mod check;
mod option;
mod read;
mod values;
mod written;

pub use option::{OptionGroup, TrainOption};
pub use values::{
    BatchOrder, FineTuneType, LrSchedule, Method, OptimizerName, ScaleRewards, Setting,
};
pub use written::Given;

options! {
    /// The adapters' shape, with mlx-lm's names.
    LoraParameters, at (config.lora_parameters) {
        /// Rank: rows of A and columns of B.
        rank: usize = 8, Flag::new(Adapter, "N");
        /// Fraction of inputs dropped in training.
        dropout: f32 = 0.0, Flag::new(Adapter, "X");
        /// The factor on the adapter's output.
        scale: f32 = 20.0, Flag::new(Adapter, "X");
        /// Projections to adapt, such as `self_attn.q_proj,self_attn.v_proj`; all linear layers of
        /// a block if absent.
        #[serde(skip_serializing_if = "Option::is_none")]
        keys: Option<Vec<String>> = None, Flag::new(Adapter, "NAMES");
    }
}

options! {
    /// All options of a run. An option that is missing in a file gets mlx-lm's default.
    TrainConfig, at (config) {
        /// The model: a directory, a .gguf file, a known name or owner/name on the Hugging Face
        /// Hub.
        model: Option<String> = None, Flag::new(General, "MODEL").short('m');
        /// Train. Implied unless test is given.
        train: bool = false, Flag::new(General, "");
        /// Measure on the test data after training. Without training, measure the adapter in
        /// adapter_path, or the model alone if adapter_path is empty.
        test: bool = false, Flag::new(General, "");
        /// The weights to train.
        fine_tune_type: FineTuneType = FineTuneType::default(), Flag::new(Adapter, "TYPE");
        /// The optimizer.
        optimizer: OptimizerName = OptimizerName::default(), Flag::new(Steps, "NAME");
        /// Further optimizer settings, by the optimizer's name, such as `adamw: {weight_decay:
        /// 0.01}`.
        optimizer_config: BTreeMap<OptimizerName, BTreeMap<String, Setting>> = BTreeMap::new();
        /// The directory with train.jsonl, and optionally valid.jsonl and test.jsonl, or one file.
        /// Parquet files can replace JSONL files.
        data: Option<PathBuf> = None, Flag::new(General, "DIR").short('d');
        /// Determines the order of batches, the initial adapters and dropout.
        seed: u32 = 0, Flag::new(Steps, "N");
        /// The number of last blocks to train; -1 means all.
        num_layers: i64 = 16, Flag::new(Adapter, "N");
        /// Examples per batch.
        batch_size: usize = 4, Flag::new(Steps, "N");
        /// The number of batches to train on.
        iters: u64 = 1000, Flag::new(Steps, "N");
        /// Batches per validation; -1 means all, 0 means none.
        val_batches: i64 = 25, Flag::new(Reports, "N");
        /// The learning rate, unless a schedule is given.
        learning_rate: f64 = 1e-5, Flag::new(Steps, "X");
        /// Batches between reports of the loss.
        steps_per_report: u64 = 10, Flag::new(Reports, "N");
        /// Batches between validations.
        steps_per_eval: u64 = 200, Flag::new(Reports, "N");
        /// Stop after this number of validations in sequence without a lower loss. The best adapter
        /// is saved in the subdirectory best, with and without this option.
        early_stopping_patience: Option<u64> = None, Flag::new(Reports, "N");
        /// The amount by which a loss must be below the best loss to count as lower, for
        /// early_stopping_patience.
        early_stopping_threshold: f64 = 0.0, Flag::new(Reports, "X");
        /// The adapter to continue from (a directory or a .safetensors file), instead of a new one.
        /// Shape options that are given must agree with its adapter_config.json.
        resume_adapter_file: Option<PathBuf> = None, Flag::new(Files, "PATH");
        /// The output directory for the adapter, the log and the plot.
        adapter_path: PathBuf = PathBuf::from("adapters"), Flag::new(Files, "DIR");
        /// Batches between saves.
        save_every: u64 = 100, Flag::new(Files, "N");
        /// Batches per test; -1 means all.
        test_batches: i64 = 500, Flag::new(Reports, "N");
        /// The maximum number of tokens per example; longer examples are truncated.
        max_seq_length: usize = 2048, Flag::new(Data, "N");
        /// Recompute blocks in the backward pass: less memory, more time.
        grad_checkpoint: bool = false, Flag::new(Steps, "");
        /// The number of batches whose gradients are averaged for one update.
        grad_accumulation_steps: usize = 1, Flag::new(Steps, "N");
        /// The learning-rate schedule.
        lr_schedule: Option<LrSchedule> = None;
        /// The adapters' shape.
        lora_parameters: LoraParameters = LoraParameters::default();
        /// Train only on the last message of a chat, or on the completion.
        mask_prompt: bool = false, Flag::new(Data, "");
        /// The field of a line that contains a chat.
        chat_feature: String = FieldNames::default().chat, Flag::new(Data, "NAME");
        /// The field of a line that contains a prompt.
        prompt_feature: String = FieldNames::default().prompt, Flag::new(Data, "NAME");
        /// The field of a line that contains a completion.
        completion_feature: String = FieldNames::default().completion, Flag::new(Data, "NAME");
        /// The field of a line that contains a text.
        text_feature: String = FieldNames::default().text, Flag::new(Data, "NAME");
        /// Pack short examples into shared rows of up to max_seq_length tokens. No example attends
        /// to another.
        pack: bool = false, Flag::new(Data, "");
        /// Make batches of adjacent lines, as with batch_order file.
        keep_order: bool = false, Flag::new(Data, "").conflicts(&["pack", "batch_order"]);
        /// Skip unusable lines instead of stopping.
        skip_bad_lines: bool = false, Flag::new(Data, "");
        /// The training objective: sft trains on texts and replies; dpo and orpo train on pairs of
        /// replies, one better than the other; kto trains on replies that are good or bad; grpo
        /// trains on replies that the model generates and reward_command judges; contrastive trains
        /// an encoder on pairs of texts that belong together, and is the default for encoders.
        method: Method = Method::default(), Flag::new(General, "METHOD");
        /// The penalty of dpo, kto and grpo on deviation from the base model, and the weight of
        /// orpo's odds ratio. Without it, 0.1, and 0 for grpo.
        beta: Option<f32> = None, Flag::new(Steps, "X");
        /// The assumed fraction of wrongly ordered pairs, for dpo.
        label_smoothing: f32 = 0.0, Flag::new(Steps, "X");
        /// The weight of good replies, for kto.
        desirable_weight: f32 = 1.0, Flag::new(Steps, "X");
        /// The weight of bad replies, for kto.
        undesirable_weight: f32 = 1.0, Flag::new(Steps, "X");
        /// The program that judges replies, for grpo. It reads one JSON object per line: the fields
        /// of the data's line, and completion. It writes one number per line.
        reward_command: Option<String> = None, Flag::new(General, "COMMAND");
        /// The number of replies to each prompt, for grpo. A batch has batch_size prompts.
        num_generations: usize = 8, Flag::new(Steps, "N");
        /// The maximum number of tokens in a reply, for grpo.
        max_completion_length: usize = 256, Flag::new(Data, "N");
        /// The temperature at which replies are drawn, for grpo.
        temperature: f32 = 1.0, Flag::new(Steps, "X");
        /// The probability mass of the tokens from which replies are drawn, for grpo.
        top_p: f32 = 1.0, Flag::new(Steps, "X");
        /// The divisor of advantages, for grpo. The value group means the standard deviation of a
        /// prompt's rewards.
        scale_rewards: ScaleRewards = ScaleRewards::default(), Flag::new(Steps, "NAME");
        /// How the losses of tokens are reduced to one loss, for grpo: dapo is the mean over all
        /// tokens of an update; bnpo is the mean over all tokens of a batch; grpo is the mean over
        /// replies; dr_grpo divides the sum by the maximum length.
        loss_type: LossType = LossType::default(), Flag::new(Steps, "NAME");
        /// The number of updates that use the same replies, for grpo.
        num_iterations: u64 = 1, Flag::new(Steps, "N");
        /// How far below 1 the ratio of a token's new and old probability is clipped, for grpo with
        /// num_iterations above 1. A clipped token has no gradient.
        epsilon: f32 = 0.2, Flag::new(Steps, "X");
        /// How far above 1 that ratio is clipped, for grpo. Without it, epsilon.
        epsilon_high: Option<f32> = None, Flag::new(Steps, "X");
        /// The factor on cosine similarities, for contrastive: the inverse of the temperature,
        /// which sentence-transformers calls scale.
        similarity_scale: f32 = 20.0, Flag::new(Steps, "X");
        /// The model's prompt before anchors, for contrastive, such as query. Without it, the
        /// model's default prompt.
        anchor_prompt_name: Option<String> = None, Flag::new(Data, "NAME");
        /// The model's prompt before positives and negatives, for contrastive, such as document.
        /// Without it, the model's default prompt.
        positive_prompt_name: Option<String> = None, Flag::new(Data, "NAME");
        /// How examples are grouped into batches: length groups examples of similar length; file
        /// groups adjacent lines; mlx-lm has the batches and order of mlx-lm with this seed; random
        /// shuffles the examples in each epoch, and is the default for contrastive.
        batch_order: BatchOrder = BatchOrder::default(),
            Flag::new(Data, "ORDER").conflicts(&["pack"]);
        /// Further files for the metrics, in addition to train_log.jsonl: jsonl (metrics.jsonl,
        /// with mlx-lm's names), tensorboard (an event file), or both, separated by a comma.
        #[serde(with = "super::report::names")]
        report_to: Vec<Report> = Vec::new(), Flag::new(Reports, "NAMES");
        /// The backend: metal, cuda or cpu. Without it, the best available backend.
        backend: Option<String> = None, Flag::new(General, "NAME");
        /// The compute type: float32, float16 or bfloat16. Without it, the backend's default.
        dtype: Option<ComputeType> = None, Flag::new(General, "TYPE");
        /// The global gradient norm above which gradients are scaled down.
        max_grad_norm: Option<f64> = None, Flag::new(Steps, "X");
        /// Trace a step once per batch shape, and replay it for other batches of this shape; auto:
        /// only on a GPU.
        compile: Compile = Compile::default(), Flag::new(Steps, "WHEN");
        /// Which options were given explicitly. Given options of the adapter's shape must agree
        /// with `resume_adapter_file`. Options that were not given are set from that adapter, or by
        /// the kind of model.
        #[serde(skip)]
        given: Given = Given::default();
    }
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

impl TrainConfig {
    /// The options for reading this run's data.
    #[must_use]
    pub fn data_options(&self) -> DataOptions {
        DataOptions::new()
            .with_mask_prompt(self.mask_prompt)
            .with_skip_bad_lines(self.skip_bad_lines)
            .with_names(FieldNames {
                chat: self.chat_feature.clone(),
                prompt: self.prompt_feature.clone(),
                completion: self.completion_feature.clone(),
                text: self.text_feature.clone(),
            })
    }

    /// The options for this run's batches.
    #[must_use]
    pub fn batch_options(&self) -> BatchOptions {
        BatchOptions::new()
            .with_batch_size(self.batch_size)
            .with_max_seq_length(self.max_seq_length)
            .with_seed(self.seed)
            .with_order(match self.batch_order {
                BatchOrder::File => Order::AsRead,
                BatchOrder::Random => Order::Shuffled,
                _ if self.keep_order => Order::AsRead,
                // mlx-lm's order sorts by fields instead of tokens.
                BatchOrder::Length | BatchOrder::MlxLm => Order::ByLength,
            })
    }
}

#[cfg(test)]
mod tests;
