//! The flags of `mlx train`. They override a config file with the same options. Names are mlx-lm's
//! where it has them.

use std::path::PathBuf;

use clap::ValueEnum;
use inference::ComputeType;
use metal_backend::train::Compile;
use metal_backend::train::config::{
    BatchOrder, FineTuneType, LrSchedule, Method, OptimizerName, TrainConfig,
};
use metal_backend::train::report::Report;

use crate::cli::learn::train::directory;
use crate::cli::terminal::failure::{Failure, chain};

/// What and how to train. A flag beats the config file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Flags {
    /// A YAML (mlx-lm's) or TOML file of these options, by their names with underscores; flags beat
    /// it
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The model: a directory, a .gguf file, a known name or owner/name on the Hugging Face Hub
    #[arg(long, short, value_name = "MODEL")]
    model: Option<String>,
    /// The directory with train.jsonl, and valid.jsonl and test.jsonl if wanted
    #[arg(long, short, value_name = "DIR", value_parser = directory)]
    data: Option<PathBuf>,
    /// Train; implied unless --test is given
    #[arg(long)]
    train: bool,
    /// Measure on test.jsonl: with --train afterwards, alone instead of training, with the adapter
    /// in --adapter-path ("" for the model alone)
    #[arg(long)]
    test: bool,
    /// What is learned from: sft, texts and replies; dpo, pairs of replies of which one is better
    /// [default: sft]
    #[arg(long, value_name = "METHOD")]
    method: Option<MethodFlag>,
    /// The backend (see `mlx backends`); without it, MLX_BACKEND, else the best available
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Compute in this type instead of the backend's choice: float32, float16 or bfloat16
    #[arg(long, value_name = "TYPE", value_parser = compute_type)]
    dtype: Option<ComputeType>,
    /// Where the adapter, the log and the plot go [default: adapters]
    #[arg(long, value_name = "DIR", value_parser = maybe_empty, help_heading = "Files")]
    adapter_path: Option<PathBuf>,
    /// Begin with this adapter (a directory or a .safetensors file) instead of a fresh one; flags
    /// must not contradict the shape in its adapter_config.json
    #[arg(long, value_name = "PATH", help_heading = "Files")]
    resume_adapter_file: Option<PathBuf>,
    /// Save every N steps [default: 100]
    #[arg(long, value_name = "N", help_heading = "Files")]
    save_every: Option<u64>,
    /// Kind of training [default: lora]
    #[arg(long, value_name = "TYPE", help_heading = "Adapter")]
    fine_tune_type: Option<Kind>,
    /// Train this many of the last blocks; -1 for all [default: 16]
    #[arg(
        long,
        value_name = "N",
        allow_hyphen_values = true,
        help_heading = "Adapter"
    )]
    num_layers: Option<i64>,
    /// Rank: rows of A and columns of B [default: 8]
    #[arg(long, value_name = "N", help_heading = "Adapter")]
    rank: Option<usize>,
    /// The factor on the adapter's output [default: 20]
    #[arg(
        long,
        value_name = "X",
        allow_hyphen_values = true,
        help_heading = "Adapter"
    )]
    scale: Option<f32>,
    /// The same as rank times --scale
    #[arg(
        long,
        value_name = "X",
        allow_hyphen_values = true,
        conflicts_with = "scale",
        help_heading = "Adapter"
    )]
    alpha: Option<f32>,
    /// Share of the inputs dropped in training [default: 0]
    #[arg(long, value_name = "X", help_heading = "Adapter")]
    dropout: Option<f32>,
    /// Projections to adapt, such as `self_attn.q_proj,self_attn.v_proj` [default: all of a block]
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        help_heading = "Adapter"
    )]
    keys: Option<Vec<String>>,
    /// Batches to learn from [default: 1000]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    iters: Option<u64>,
    /// Examples of a batch [default: 4]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    batch_size: Option<usize>,
    /// Batches whose gradients make one step [default: 1]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    grad_accumulation_steps: Option<usize>,
    /// Compute blocks again in the backward pass: less memory, more time
    #[arg(long, help_heading = "Steps")]
    grad_checkpoint: bool,
    /// Trace a step once for each form of its batch and replay it; auto: on a GPU [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = "Steps")]
    compile: Option<CompileFlag>,
    /// Scale gradients down to this norm, all of them together
    #[arg(long, value_name = "X", help_heading = "Steps")]
    max_grad_norm: Option<f64>,
    /// What turns gradients into steps [default: adam]
    #[arg(long, value_name = "NAME", help_heading = "Steps")]
    optimizer: Option<OptimizerFlag>,
    /// Learning rate [default: 1e-5]
    #[arg(long, value_name = "X", help_heading = "Steps")]
    learning_rate: Option<f64>,
    /// How the learning rate goes on from --learning-rate: constant, linear or cosine
    #[arg(long, value_name = "NAME", help_heading = "Steps")]
    lr_schedule: Option<ScheduleFlag>,
    /// The learning rate at the end of --lr-schedule [default: 0]
    #[arg(
        long,
        value_name = "X",
        requires = "lr_schedule",
        help_heading = "Steps"
    )]
    lr_end: Option<f64>,
    /// Steps of --lr-schedule [default: all that follow the warm-up]
    #[arg(
        long,
        value_name = "N",
        requires = "lr_schedule",
        help_heading = "Steps"
    )]
    lr_steps: Option<u64>,
    /// Steps in which the learning rate rises to --learning-rate
    #[arg(long, value_name = "N", help_heading = "Steps")]
    warmup: Option<u64>,
    /// The learning rate at the beginning of the rise [default: 0]
    #[arg(long, value_name = "X", requires = "warmup", help_heading = "Steps")]
    warmup_init: Option<f64>,
    /// Decides the order of batches, the fresh adapter and dropout [default: 0]
    #[arg(long, value_name = "N", help_heading = "Steps")]
    seed: Option<u32>,
    /// Of dpo: how dear leaving the model without its adapter is [default: 0.1]
    #[arg(long, value_name = "X", help_heading = "Steps")]
    beta: Option<f32>,
    /// Of dpo: the share of pairs whose order is wrong [default: 0]
    #[arg(long, value_name = "X", help_heading = "Steps")]
    label_smoothing: Option<f32>,
    /// Learn only the last message of a chat, or the completion
    #[arg(long, help_heading = "Data")]
    mask_prompt: bool,
    /// Tokens of an example at most; longer ones are cut [default: 2048]
    #[arg(long, value_name = "N", help_heading = "Data")]
    max_seq_length: Option<usize>,
    /// Go on without lines that cannot be used, instead of stopping
    #[arg(long, help_heading = "Data")]
    skip_bad_lines: bool,
    /// Put short examples together up to --max-seq-length tokens; they do not see each other
    #[arg(long, help_heading = "Data")]
    pack: bool,
    /// Make batches of neighboring lines instead of examples of like length; as --batch-order file
    #[arg(long, conflicts_with_all = ["pack", "batch_order"], help_heading = "Data")]
    keep_order: bool,
    /// Which examples share a batch: length, those of like length; file, neighboring lines; mlx-lm,
    /// those that share one in mlx-lm with this seed, in its order [default: length]
    #[arg(
        long,
        value_name = "ORDER",
        conflicts_with = "pack",
        help_heading = "Data"
    )]
    batch_order: Option<OrderFlag>,
    /// The field of a line that holds a chat [default: messages]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    chat_feature: Option<String>,
    /// The field of a line that holds a prompt [default: prompt]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    prompt_feature: Option<String>,
    /// The field of a line that holds a completion [default: completion]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    completion_feature: Option<String>,
    /// The field of a line that holds a text [default: text]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    text_feature: Option<String>,
    /// Further files with the figures, beside train_log.jsonl: jsonl (metrics.jsonl, with mlx-lm's
    /// names), tensorboard (an event file); both with a comma
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        help_heading = "Reports"
    )]
    report_to: Option<Vec<Report>>,
    /// Of mlx-lm: the title of reports to services, of which there are none here
    #[arg(long, value_name = "NAME", hide = true)]
    project_name: Option<String>,
    /// Report the loss every N steps [default: 10]
    #[arg(long, value_name = "N", help_heading = "Reports")]
    steps_per_report: Option<u64>,
    /// Validate every N steps [default: 200]
    #[arg(long, value_name = "N", help_heading = "Reports")]
    steps_per_eval: Option<u64>,
    /// Batches of a validation; -1 for all, 0 for none [default: 25]
    #[arg(
        long,
        value_name = "N",
        allow_hyphen_values = true,
        help_heading = "Reports"
    )]
    val_batches: Option<i64>,
    /// Batches of the test; -1 for all [default: 500]
    #[arg(
        long,
        value_name = "N",
        allow_hyphen_values = true,
        help_heading = "Reports"
    )]
    test_batches: Option<i64>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    Lora,
    Dora,
    Full,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MethodFlag {
    Sft,
    Dpo,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OrderFlag {
    Length,
    File,
    MlxLm,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum CompileFlag {
    Auto,
    On,
    Off,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OptimizerFlag {
    Adam,
    Adamw,
    Muon,
    Sgd,
    Adafactor,
    Lion,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleFlag {
    Constant,
    #[value(alias = "linear_schedule")]
    Linear,
    #[value(alias = "cosine_decay")]
    Cosine,
}

fn compute_type(text: &str) -> Result<ComputeType, String> {
    text.parse()
        .map_err(|_| "must be float32, float16 or bfloat16".to_owned())
}

/// Parses a path that may be empty. clap's own parser refuses an empty path.
fn maybe_empty(text: &str) -> Result<PathBuf, std::convert::Infallible> {
    Ok(PathBuf::from(text))
}

/// Replaces the value of the file or the default by the flag, if given.
fn put<T: Clone>(place: &mut T, flag: &Option<T>) {
    if let Some(value) = flag {
        place.clone_from(value);
    }
}

impl Flags {
    /// The checked options of the run.
    pub fn config(&self) -> Result<TrainConfig, Failure> {
        let mut c = match &self.config {
            Some(path) => TrainConfig::read(path).map_err(|e| Failure::usage(chain(&e)))?,
            None => TrainConfig::default(),
        };
        self.put_over(&mut c);
        // mlx-lm requires one of the two flags. With `test` alone, it does not train either.
        c.train |= !c.test;
        if c.data.is_none() {
            let file = if c.train { "train.jsonl" } else { "test.jsonl" };
            return Err(Failure::usage(format!(
                "--data is missing: a directory with {file}"
            )));
        }
        if c.resume_adapter_file.is_some() && self.alpha.is_some() && self.rank.is_none() {
            return Err(Failure::usage(
                "--alpha means nothing without the rank of the adapter to begin with; add --rank, or give --scale",
            ));
        }
        if c.train && c.adapter_path.as_os_str().is_empty() {
            return Err(Failure::usage("--adapter-path must name a directory"));
        }
        if c.method != Method::Dpo && (self.beta.is_some() || self.label_smoothing.is_some()) {
            return Err(Failure::usage(
                "--beta and --label-smoothing are about preferences; add --method dpo",
            ));
        }
        if c.method == Method::Dpo && c.mask_prompt {
            return Err(Failure::usage(
                "--mask-prompt means nothing for dpo, which never learns prompts",
            ));
        }
        c.validate().map_err(|e| Failure::usage(e.to_string()))?;
        metal_backend::train::plan::check(&c).map_err(|e| Failure::usage(format!("{e:#}")))?;
        Ok(c)
    }

    fn put_over(&self, c: &mut TrainConfig) {
        c.train |= self.train;
        c.test |= self.test;
        c.mask_prompt |= self.mask_prompt;
        c.skip_bad_lines |= self.skip_bad_lines;
        c.pack |= self.pack;
        c.keep_order |= self.keep_order;
        c.grad_checkpoint |= self.grad_checkpoint;
        for (place, flag) in [
            (&mut c.data, &self.data),
            (&mut c.resume_adapter_file, &self.resume_adapter_file),
        ] {
            if flag.is_some() {
                place.clone_from(flag);
            }
        }
        for (place, flag) in [(&mut c.model, &self.model), (&mut c.backend, &self.backend)] {
            if flag.is_some() {
                place.clone_from(flag);
            }
        }
        c.dtype = self.dtype.or(c.dtype);
        put(&mut c.adapter_path, &self.adapter_path);
        put(&mut c.save_every, &self.save_every);
        put(&mut c.num_layers, &self.num_layers);
        put(&mut c.iters, &self.iters);
        put(&mut c.batch_size, &self.batch_size);
        put(
            &mut c.grad_accumulation_steps,
            &self.grad_accumulation_steps,
        );
        put(&mut c.learning_rate, &self.learning_rate);
        put(&mut c.seed, &self.seed);
        put(&mut c.max_seq_length, &self.max_seq_length);
        put(&mut c.chat_feature, &self.chat_feature);
        put(&mut c.prompt_feature, &self.prompt_feature);
        put(&mut c.completion_feature, &self.completion_feature);
        put(&mut c.text_feature, &self.text_feature);
        put(&mut c.steps_per_report, &self.steps_per_report);
        put(&mut c.steps_per_eval, &self.steps_per_eval);
        put(&mut c.val_batches, &self.val_batches);
        put(&mut c.test_batches, &self.test_batches);
        c.max_grad_norm = self.max_grad_norm.or(c.max_grad_norm);
        put(&mut c.method, &self.method.map(MethodFlag::of));
        put(&mut c.beta, &self.beta);
        put(&mut c.label_smoothing, &self.label_smoothing);
        put(&mut c.batch_order, &self.batch_order.map(OrderFlag::of));
        put(&mut c.report_to, &self.report_to);
        let given = &mut c.given;
        given.fine_tune_type |= self.fine_tune_type.is_some();
        given.num_layers |= self.num_layers.is_some();
        given.rank |= self.rank.is_some();
        given.dropout |= self.dropout.is_some();
        given.scale |= self.scale.is_some() || self.alpha.is_some();
        given.keys |= self.keys.is_some();
        let lora = &mut c.lora_parameters;
        put(&mut lora.rank, &self.rank);
        put(&mut lora.dropout, &self.dropout);
        put(&mut lora.scale, &self.scale);
        if let Some(alpha) = self.alpha {
            lora.scale = alpha / lora.rank.max(1) as f32;
        }
        if self.keys.is_some() {
            lora.keys.clone_from(&self.keys);
        }
        put(&mut c.fine_tune_type, &self.fine_tune_type.map(Kind::of));
        put(&mut c.compile, &self.compile.map(CompileFlag::of));
        put(&mut c.optimizer, &self.optimizer.map(OptimizerFlag::of));
        self.put_schedule(c);
    }

    /// A schedule in flags replaces that of the file. A learning rate alone replaces only its first
    /// number.
    fn put_schedule(&self, c: &mut TrainConfig) {
        let rate = c.learning_rate;
        if self.lr_schedule.is_some() || (self.warmup.is_some() && c.lr_schedule.is_none()) {
            let warmup = self.warmup.unwrap_or(0);
            let updates = c.iters / c.grad_accumulation_steps.max(1) as u64;
            let steps = self
                .lr_steps
                .unwrap_or(updates.saturating_sub(warmup).max(1));
            let (steps, end) = (steps as f64, self.lr_end.unwrap_or(0.0));
            let (name, arguments) = match self.lr_schedule.unwrap_or(ScheduleFlag::Constant) {
                ScheduleFlag::Constant => ("constant", vec![rate]),
                ScheduleFlag::Linear => ("linear_schedule", vec![rate, end, steps]),
                ScheduleFlag::Cosine => ("cosine_decay", vec![rate, steps, end]),
            };
            c.lr_schedule = Some(LrSchedule {
                name: name.to_owned(),
                arguments,
                warmup,
                warmup_init: self.warmup_init.unwrap_or(0.0),
            });
        } else if let Some(schedule) = &mut c.lr_schedule {
            if let (Some(rate), Some(first)) = (self.learning_rate, schedule.arguments.first_mut())
            {
                *first = rate;
            }
            put(&mut schedule.warmup, &self.warmup);
            put(&mut schedule.warmup_init, &self.warmup_init);
        }
    }
}

impl Kind {
    fn of(self) -> FineTuneType {
        match self {
            Self::Lora => FineTuneType::Lora,
            Self::Dora => FineTuneType::Dora,
            Self::Full => FineTuneType::Full,
        }
    }
}

impl MethodFlag {
    fn of(self) -> Method {
        match self {
            Self::Sft => Method::Sft,
            Self::Dpo => Method::Dpo,
        }
    }
}

impl OrderFlag {
    fn of(self) -> BatchOrder {
        match self {
            Self::Length => BatchOrder::Length,
            Self::File => BatchOrder::File,
            Self::MlxLm => BatchOrder::MlxLm,
        }
    }
}

impl CompileFlag {
    fn of(self) -> Compile {
        match self {
            Self::Auto => Compile::Auto,
            Self::On => Compile::On,
            Self::Off => Compile::Off,
        }
    }
}

impl OptimizerFlag {
    fn of(self) -> OptimizerName {
        match self {
            Self::Adam => OptimizerName::Adam,
            Self::Adamw => OptimizerName::AdamW,
            Self::Muon => OptimizerName::Muon,
            Self::Sgd => OptimizerName::Sgd,
            Self::Adafactor => OptimizerName::Adafactor,
            Self::Lion => OptimizerName::Lion,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn read(args: &[&str]) -> Result<TrainConfig, Failure> {
        let all = ["train", "--data", "d"].iter().chain(args);
        Line::try_parse_from(all).unwrap().flags.config()
    }

    #[test]
    fn flags_beat_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.yaml");
        let yaml = "iters: 7\nbatch_size: 2\nlora_parameters: {rank: 4, scale: 2.0}\nlearning_rate: 0.5\n\
                    lr_schedule: {name: cosine_decay, arguments: [0.1, 7], warmup: 3}\n";
        std::fs::write(&path, yaml).unwrap();
        let path = path.to_str().unwrap();
        let c = read(&["-c", path]).unwrap();
        assert_eq!((c.iters, c.batch_size, c.lora_parameters.rank), (7, 2, 4));
        let c = read(&[
            "-c",
            path,
            "--iters",
            "9",
            "--alpha",
            "16",
            "--learning-rate",
            "0.2",
            "--warmup",
            "1",
        ])
        .unwrap();
        assert_eq!((c.iters, c.batch_size), (9, 2));
        assert_eq!((c.lora_parameters.rank, c.lora_parameters.scale), (4, 4.0));
        let schedule = c.lr_schedule.unwrap();
        assert_eq!((schedule.arguments, schedule.warmup), (vec![0.2, 7.0], 1));
        std::fs::write(path, "iters: 7\nitres: 3\n").unwrap();
        let failure = read(&["-c", path]).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().unwrap().contains("itres"));
    }

    #[test]
    fn a_step_is_compiled_when_the_file_or_the_flag_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.yaml");
        std::fs::write(&path, "compile: off\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(read(&[]).unwrap().compile, Compile::Auto);
        assert_eq!(read(&["-c", path]).unwrap().compile, Compile::Off);
        let both = read(&["-c", path, "--compile", "on"]).unwrap();
        assert_eq!(both.compile, Compile::On);
    }

    #[test]
    fn schedules_by_flags() {
        let c = read(&[
            "--iters",
            "20",
            "--grad-accumulation-steps",
            "2",
            "--lr-schedule",
            "cosine",
            "--warmup",
            "4",
            "--learning-rate",
            "0.1",
        ])
        .unwrap();
        let schedule = c.lr_schedule.unwrap();
        assert_eq!(schedule.arguments, [0.1, 6.0, 0.0]);
        assert_eq!((schedule.warmup, schedule.warmup_init), (4, 0.0));
        let c = read(&["--warmup", "4"]).unwrap().lr_schedule.unwrap();
        assert_eq!((c.name.as_str(), c.arguments), ("constant", vec![1e-5]));
    }

    #[test]
    fn impossible_values_are_usage_errors() {
        for (args, what) in [
            (&["--iters", "0"][..], "iters is 0"),
            (&["--rank", "0"], "rank is 0"),
            (&["--num-layers", "-2"], "num_layers is -2"),
            (&["--learning-rate", "nan"], "learning_rate"),
            (&["--keys", ""], "keys"),
            (&["--dropout", "1"], "dropout"),
        ] {
            let failure = read(args).unwrap_err();
            assert_eq!(failure.exit_code(), 2, "{args:?}");
            assert!(failure.report().unwrap().contains(what), "{args:?}");
        }
        let none = Line::try_parse_from(["train"]).unwrap().flags.config();
        assert!(none.unwrap_err().report().unwrap().contains("--data"));
    }
}
