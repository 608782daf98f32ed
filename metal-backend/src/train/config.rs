//! The options of a training run, from a YAML or TOML file with the names of Python mlx-lm's `lora`
//! config.
//!
//! Files are read, completed with defaults and validated here. The program overrides them with
//! command-line flags.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use inference::{ComputeType, Error, ErrorKind, Result};
use serde::de::{DeserializeOwned, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Compile;
use super::dataset::{BatchOptions, DataOptions, FieldNames, Order};
use super::report::Report;

mod written;

pub use written::Given;
use written::{Written, without_harmless};

/// The maximum size of a config file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The weights to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FineTuneType {
    /// Low-rank adapters (Hu et al. 2021).
    #[default]
    Lora,
    /// Low-rank adapters with magnitudes (Liu et al. 2024).
    Dora,
    /// The model's own weights.
    Full,
}

/// The training objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Cross-entropy on texts and replies (supervised fine-tuning).
    #[default]
    Sft,
    /// Preference between pairs of replies (direct preference optimization, Rafailov et al. 2023).
    Dpo,
}

/// How examples are grouped into batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BatchOrder {
    /// Examples of similar length share a batch.
    #[default]
    Length,
    /// Adjacent examples in the file share a batch.
    File,
    /// The batches and order of mlx-lm's `train`.
    MlxLm,
}

/// The optimizer. In files, names are case-insensitive, as in mlx-lm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are those of the methods")]
pub enum OptimizerName {
    #[default]
    Adam,
    AdamW,
    Muon,
    Sgd,
    Adafactor,
    Lion,
}

impl<'de> Deserialize<'de> for OptimizerName {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> std::result::Result<Self, D::Error> {
        const NAMES: [&str; 6] = ["adam", "adamw", "muon", "sgd", "adafactor", "lion"];
        let name = String::deserialize(reader)?;
        match name.to_ascii_lowercase().as_str() {
            "adam" => Ok(Self::Adam),
            "adamw" => Ok(Self::AdamW),
            "muon" => Ok(Self::Muon),
            "sgd" => Ok(Self::Sgd),
            "adafactor" => Ok(Self::Adafactor),
            "lion" => Ok(Self::Lion),
            _ => Err(serde::de::Error::unknown_variant(&name, &NAMES)),
        }
    }
}

/// The adapters' shape, with mlx-lm's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraParameters {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// Fraction of inputs dropped in training.
    pub dropout: f32,
    /// The factor on the adapter's output.
    pub scale: f32,
    /// Projections to adapt, such as `self_attn.q_proj`; all linear layers of a block if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<Vec<String>>,
}

impl Default for LoraParameters {
    fn default() -> Self {
        Self {
            rank: 8,
            dropout: 0.0,
            scale: 20.0,
            keys: None,
        }
    }
}

/// The learning-rate schedule, with mlx-lm's names.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedule {
    /// `cosine_decay`, `exponential_decay`, `linear_schedule`, `step_decay` or `constant`.
    pub name: String,
    /// Its arguments, in the order of MLX's function of that name: of `cosine_decay` the first
    /// rate, steps, last rate.
    pub arguments: Vec<f64>,
    /// Steps of warmup, until the rate reaches the schedule's first.
    pub warmup: u64,
    /// The rate at the start of warmup.
    pub warmup_init: f64,
}

/// All options of a run. A field missing in a file has its default, which is mlx-lm's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// The model: a directory, a file or a name.
    pub model: Option<String>,
    /// Whether to train; required by mlx-lm. [`super::Run`] ignores it.
    pub train: bool,
    /// Whether to evaluate on `test.jsonl` after training.
    pub test: bool,
    /// The weights to train.
    pub fine_tune_type: FineTuneType,
    /// The optimizer.
    pub optimizer: OptimizerName,
    /// Further optimizer settings, by the optimizer's name, such as `adamw: {weight_decay: 0.01}`.
    pub optimizer_config: BTreeMap<OptimizerName, BTreeMap<String, Setting>>,
    /// The directory with `train.jsonl`, `valid.jsonl` and `test.jsonl`.
    pub data: Option<PathBuf>,
    /// Determines the order of batches, the initial adapters and dropout.
    pub seed: u32,
    /// The number of last blocks to train; -1 for all.
    pub num_layers: i64,
    /// Rows per batch.
    pub batch_size: usize,
    /// The number of steps.
    pub iters: u64,
    /// Batches per validation; -1 for all.
    pub val_batches: i64,
    /// The learning rate, unless `lr_schedule` is given.
    pub learning_rate: f64,
    /// Steps between reports.
    pub steps_per_report: u64,
    /// Steps between validations.
    pub steps_per_eval: u64,
    /// The adapter to continue from.
    pub resume_adapter_file: Option<PathBuf>,
    /// The output directory for adapters.
    pub adapter_path: PathBuf,
    /// Steps between saves.
    pub save_every: u64,
    /// Batches per test; -1 for all.
    pub test_batches: i64,
    /// The maximum token ids per row.
    pub max_seq_length: usize,
    /// Whether blocks are recomputed in the backward pass, to save memory.
    pub grad_checkpoint: bool,
    /// The number of batches whose gradients form one step.
    pub grad_accumulation_steps: usize,
    /// The learning-rate schedule.
    pub lr_schedule: Option<LrSchedule>,
    /// The adapters' shape.
    pub lora_parameters: LoraParameters,
    /// Whether the loss covers only the last message or the completion.
    pub mask_prompt: bool,
    /// The field of a line that holds a chat.
    pub chat_feature: String,
    /// The field of a line that holds a prompt.
    pub prompt_feature: String,
    /// The field of a line that holds a completion.
    pub completion_feature: String,
    /// The field of a line that holds a text.
    pub text_feature: String,
    /// Ours: whether short examples are packed into shared rows.
    pub pack: bool,
    /// Ours: whether batches consist of adjacent lines instead of lines with similar length.
    pub keep_order: bool,
    /// Ours: whether to skip unusable lines.
    pub skip_bad_lines: bool,
    /// Ours: the training objective.
    pub method: Method,
    /// Ours: the penalty of [`Method::Dpo`] on deviation from the base model.
    pub beta: f32,
    /// Ours: the assumed fraction of wrongly ordered pairs, for [`Method::Dpo`].
    pub label_smoothing: f32,
    /// Ours: how examples are grouped into batches; `keep_order` equals `file`.
    pub batch_order: BatchOrder,
    /// Further files for the metrics of the run.
    #[serde(with = "super::report::names")]
    pub report_to: Vec<Report>,
    /// Ours: the backend: metal, cuda or cpu; the best available if absent.
    pub backend: Option<String>,
    /// Ours: the compute type; the backend's default if absent.
    pub dtype: Option<ComputeType>,
    /// Ours: the global gradient norm above which gradients are scaled down.
    pub max_grad_norm: Option<f64>,
    /// Ours: whether a step is traced once and replayed.
    pub compile: Compile,
    /// Which adapter shape options were given explicitly. Those must agree with
    /// `resume_adapter_file`; the others are taken from it.
    #[serde(skip)]
    pub given: Given,
}

/// A value in [`TrainConfig::optimizer_config`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Setting {
    /// On or off.
    Flag(bool),
    /// A number.
    Number(f64),
    /// A list, such as `betas`.
    Numbers(Vec<f64>),
}

impl Default for TrainConfig {
    fn default() -> Self {
        let names = FieldNames::default();
        Self {
            model: None,
            train: false,
            test: false,
            fine_tune_type: FineTuneType::default(),
            optimizer: OptimizerName::default(),
            optimizer_config: BTreeMap::new(),
            data: None,
            seed: 0,
            num_layers: 16,
            batch_size: 4,
            iters: 1000,
            val_batches: 25,
            learning_rate: 1e-5,
            steps_per_report: 10,
            steps_per_eval: 200,
            resume_adapter_file: None,
            adapter_path: PathBuf::from("adapters"),
            save_every: 100,
            test_batches: 500,
            max_seq_length: 2048,
            grad_checkpoint: false,
            grad_accumulation_steps: 1,
            lr_schedule: None,
            lora_parameters: LoraParameters::default(),
            mask_prompt: false,
            chat_feature: names.chat,
            prompt_feature: names.prompt,
            completion_feature: names.completion,
            text_feature: names.text,
            pack: false,
            keep_order: false,
            skip_bad_lines: false,
            method: Method::default(),
            beta: 0.1,
            label_smoothing: 0.0,
            batch_order: BatchOrder::default(),
            report_to: Vec::new(),
            backend: None,
            dtype: None,
            max_grad_norm: None,
            compile: Compile::default(),
            given: Given::default(),
        }
    }
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// The file format of a config.
#[derive(Clone, Copy)]
enum Format {
    Yaml,
    Toml,
}

impl Format {
    fn read<T: DeserializeOwned>(self, text: &str) -> std::result::Result<T, String> {
        match self {
            Self::Yaml => serde_saphyr::from_str(text).map_err(|e| e.to_string()),
            Self::Toml => toml::from_str(text).map_err(|e| e.to_string()),
        }
    }
}

impl TrainConfig {
    /// Reads and checks a file: `.yaml`, `.yml`, `.json` (mlx-lm's `adapter_config.json`) or
    /// `.toml`.
    ///
    /// # Errors
    /// `Io` if the file cannot be read; `InvalidOption` for another file type, and for a field that
    /// is unknown, of the wrong type or out of range. All errors name the file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let named = |e: Error| e.with_path(path).context("training config");
        let kind = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default();
        let parse = match kind.to_ascii_lowercase().as_str() {
            // JSON is YAML.
            "yaml" | "yml" | "json" => Self::from_yaml,
            "toml" => Self::from_toml,
            _ => {
                return Err(named(bad(
                    "the file's name must end in .yaml, .yml, .json or .toml",
                )));
            }
        };
        let io = |e: std::io::Error| {
            named(Error::new(ErrorKind::Io, "cannot read the file").with_source(e))
        };
        // Checked before opening, because opening a pipe would block.
        if !path.metadata().map_err(io)?.is_file() {
            return Err(named(bad("it is not a regular file")));
        }
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|f| f.take(MAX_BYTES + 1).read_to_string(&mut text))
            .map_err(io)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(named(bad(format!(
                "the file has more than {MAX_BYTES} bytes; a config is small"
            ))));
        }
        parse(&text).map_err(named)
    }

    /// Reads YAML and checks it.
    ///
    /// # Errors
    /// As [`TrainConfig::read`].
    pub fn from_yaml(text: &str) -> Result<Self> {
        if text
            .lines()
            .all(|l| l.trim().is_empty() || l.trim_start().starts_with('#'))
        {
            return Ok(Self::default());
        }
        Self::read_by(Format::Yaml, text)
    }

    /// Reads TOML and checks it.
    ///
    /// # Errors
    /// As [`TrainConfig::read`].
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::read_by(Format::Toml, text)
    }

    /// Parses a text in a format.
    fn read_by(format: Format, text: &str) -> Result<Self> {
        let wrong = |e: String| bad(helped(&e));
        match format.read::<Self>(text) {
            Ok(config) => config.checked(|| format.read(text).map_err(wrong)),
            Err(first) => {
                // This parse comes first, because its errors have line numbers, which a `Value`
                // lacks.
                let mut value: Value = format.read(text).map_err(|_| wrong(first.clone()))?;
                if !without_harmless(&mut value) {
                    return Err(wrong(first));
                }
                let again = |e: serde_json::Error| wrong(e.to_string());
                let config = Self::deserialize(&value).map_err(again)?;
                config.checked(|| Written::deserialize(&value).map_err(again))
            }
        }
    }

    fn checked(mut self, written: impl FnOnce() -> Result<Written>) -> Result<Self> {
        self.validate()?;
        self.given = written()?.given();
        Ok(self)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// `InvalidOption` naming the field, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("batch_size", self.batch_size as u64),
            ("iters", self.iters),
            ("steps_per_report", self.steps_per_report),
            ("steps_per_eval", self.steps_per_eval),
            ("save_every", self.save_every),
            (
                "grad_accumulation_steps",
                self.grad_accumulation_steps as u64,
            ),
            ("lora_parameters.rank", self.lora_parameters.rank as u64),
        ];
        if let Some((name, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(bad(format!("{name} is 0; it must be at least 1")));
        }
        let counts = [
            ("num_layers", self.num_layers),
            ("val_batches", self.val_batches),
            ("test_batches", self.test_batches),
        ];
        if let Some((name, value)) = counts.iter().find(|(_, value)| *value < -1) {
            return Err(bad(format!(
                "{name} is {value}; it must be a count, or -1 for all"
            )));
        }
        if self.max_seq_length < 2 {
            let have = self.max_seq_length;
            return Err(bad(format!(
                "max_seq_length is {have}; it must be at least 2"
            )));
        }
        let rates = [
            Some(("learning_rate", self.learning_rate)),
            self.max_grad_norm.map(|n| ("max_grad_norm", n)),
        ];
        for (name, value) in rates.into_iter().flatten() {
            if !(value.is_finite() && value > 0.0) {
                return Err(bad(format!(
                    "{name} is {value}; it must be a number above 0"
                )));
            }
        }
        let lora = &self.lora_parameters;
        if !(0.0..1.0).contains(&lora.dropout) {
            let have = lora.dropout;
            return Err(bad(format!(
                "lora_parameters.dropout is {have}; it must lie in 0 to below 1"
            )));
        }
        if !lora.scale.is_finite() {
            let have = lora.scale;
            return Err(bad(format!(
                "lora_parameters.scale is {have}; it must be a number"
            )));
        }
        if lora
            .keys
            .as_ref()
            .is_some_and(|k| k.is_empty() || k.iter().any(String::is_empty))
        {
            return Err(bad(
                "lora_parameters.keys must name at least one projection, none empty; leave it out for all",
            ));
        }
        if self.pack && self.keep_order {
            // Packing already follows the file's order.
            return Err(bad(
                "pack keeps the order of lines already; leave keep_order out",
            ));
        }
        if self.keep_order && self.batch_order == BatchOrder::MlxLm {
            return Err(bad(
                "keep_order and batch_order mlx-lm are two orders; leave one out",
            ));
        }
        if self.pack && self.batch_order != BatchOrder::Length {
            return Err(bad("pack has an order of its own; leave batch_order out"));
        }
        match self.method {
            Method::Sft => {}
            Method::Dpo if self.pack => {
                return Err(bad("pairs of replies are not packed; leave pack out"));
            }
            Method::Dpo if self.batch_order == BatchOrder::MlxLm => {
                return Err(bad(
                    "mlx-lm has no dpo, so there is no order of its batches; leave batch_order out",
                ));
            }
            Method::Dpo => {
                let (beta, smoothing) = (self.beta, self.label_smoothing);
                if !(beta.is_finite() && beta > 0.0) {
                    return Err(bad(format!("beta is {beta}; it must be a number above 0")));
                }
                if !(0.0..0.5).contains(&smoothing) {
                    return Err(bad(format!(
                        "label_smoothing is {smoothing}; it must lie in 0 to below 0.5"
                    )));
                }
            }
        }
        self.lr_schedule
            .as_ref()
            .map_or(Ok(()), LrSchedule::validate)
    }

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
                _ if self.keep_order => Order::AsRead,
                // mlx-lm's order sorts by fields instead of tokens.
                BatchOrder::Length | BatchOrder::MlxLm => Order::ByLength,
            })
    }
}

impl LrSchedule {
    fn validate(&self) -> Result<()> {
        // The schedules of MLX and the allowed number of arguments of each.
        let known = [
            ("cosine_decay", 2..=3),
            ("exponential_decay", 2..=2),
            ("linear_schedule", 3..=3),
            ("step_decay", 3..=3),
            ("constant", 1..=1),
        ];
        let name = &self.name;
        let Some((_, count)) = known.iter().find(|(known, _)| known == name) else {
            let names = known.map(|(name, _)| name).join(", ");
            return Err(bad(format!(
                "lr_schedule.name is {name:?}; there are {names}"
            )));
        };
        let have = self.arguments.len();
        if !count.contains(&have) {
            let (from, to) = (count.start(), count.end());
            return Err(bad(format!(
                "lr_schedule.arguments of {name} are {have}; it takes {from} to {to}"
            )));
        }
        if !self.arguments.iter().all(|a| a.is_finite()) || !self.warmup_init.is_finite() {
            return Err(bad("lr_schedule holds something that is no number"));
        }
        Ok(())
    }
}

/// A parser's message, with a suggestion for an unknown name.
fn helped(message: &str) -> String {
    // Parsers append an excerpt of the file; the message alone is enough.
    let message = message.trim().replace('\n', " ");
    let hint = |name: &str| match name {
        "hf_dataset" => {
            Some("give `data`, a directory with train.jsonl; data sets are not downloaded")
        }
        "alpha" => Some("write `scale`, which is alpha / rank"),
        _ => None,
    };
    let Some(name) = message
        .split_once("unknown field `")
        .and_then(|(_, rest)| rest.split_once('`'))
        .map(|(name, _)| name.to_owned())
    else {
        return message;
    };
    match hint(&name) {
        Some(hint) => format!("{message}; {hint}"),
        None => message,
    }
}

#[cfg(test)]
mod tests;
