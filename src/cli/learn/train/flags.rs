//! The flags of `mlx train`. They override the options of a config file. Names are those of mlx-lm,
//! where mlx-lm has the flag. [`TrainConfig`] declares the options. This file declares only flags
//! that set several options, or a part of one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueEnum};
use metal_backend::train::config::{LrSchedule, Method, TrainConfig, TrainOption};

use crate::cli::terminal::failure::{Failure, chain};

/// The options of the training run. A flag overrides the config file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Flags {
    /// A YAML (mlx-lm's) or TOML file of these options, named with underscores; flags override the
    /// file
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    options: OptionFlags,
    /// The adapter's scale times its rank, instead of --scale
    #[arg(
        long,
        value_name = "X",
        allow_hyphen_values = true,
        conflicts_with = "scale",
        help_heading = "Adapter"
    )]
    alpha: Option<f32>,
    /// How the learning rate changes from --learning-rate: constant, linear or cosine
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
    /// Steps of --lr-schedule [default: all steps after the warm-up]
    #[arg(
        long,
        value_name = "N",
        requires = "lr_schedule",
        help_heading = "Steps"
    )]
    lr_steps: Option<u64>,
    /// Number of first steps in which the learning rate rises to --learning-rate
    #[arg(long, value_name = "N", help_heading = "Steps")]
    warmup: Option<u64>,
    /// The learning rate at the start of the warm-up [default: 0]
    #[arg(long, value_name = "X", requires = "warmup", help_heading = "Steps")]
    warmup_init: Option<f64>,
    /// mlx-lm's title for reports to services; this program has no such reports
    #[arg(long, value_name = "NAME", hide = true)]
    project_name: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScheduleFlag {
    Constant,
    #[value(alias = "linear_schedule")]
    Linear,
    #[value(alias = "cosine_decay")]
    Cosine,
}

/// A flag for each [`TrainOption`], with the values that the user gave as text.
#[derive(Debug, Clone, Default)]
struct OptionFlags {
    given: BTreeMap<&'static str, OsString>,
}

impl OptionFlags {
    fn has(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    fn apply(&self, config: &mut TrainConfig) -> Result<(), Failure> {
        for option in TrainOption::all() {
            if let Some(text) = self.given.get(option.name()) {
                option
                    .set(config, text)
                    .map_err(|e| Failure::usage(e.message()))?;
            }
        }
        Ok(())
    }
}

/// The flags without dashes, by option name: `batch-size` for `batch_size`.
static NAMES: LazyLock<BTreeMap<&'static str, String>> = LazyLock::new(|| {
    TrainOption::all()
        .map(|option| (option.name(), option.name().replace('_', "-")))
        .collect()
});

fn argument(option: &'static TrainOption) -> Arg {
    let name = option.name();
    let mut help = option.documentation().trim_end_matches('.').to_owned();
    if let Some(default) = option.default_text() {
        help.push_str(&format!(" [default: {default}]"));
    }
    let argument = Arg::new(name)
        .long(NAMES.get(name).map_or(name, String::as_str))
        .short(option.short())
        .help(help)
        .help_heading(option.group().heading())
        .conflicts_with_all(option.conflicts());
    if option.is_switch() {
        return argument.action(ArgAction::SetTrue);
    }
    let action = match option.is_list() {
        true => ArgAction::Append,
        false => ArgAction::Set,
    };
    argument
        .action(action)
        .value_name(option.placeholder())
        .allow_negative_numbers(true)
        .value_parser(parser(option))
}

/// A parser of the texts that the option accepts.
fn parser(option: &'static TrainOption) -> ValueParser {
    if !option.choices().is_empty() {
        let names = PossibleValuesParser::new(option.choices().iter().copied());
        return names.map(OsString::from).into();
    }
    ValueParser::from(OsStringValueParser::new().try_map(move |text| {
        match option.set(&mut TrainConfig::default(), &text) {
            Ok(()) => Ok(text),
            Err(e) => Err(e.message().to_owned()),
        }
    }))
}

impl clap::Args for OptionFlags {
    fn augment_args(command: Command) -> Command {
        command.args(TrainOption::all().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for OptionFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for option in TrainOption::all() {
            let name = option.name();
            let text = match option.is_switch() {
                true => matches.get_flag(name).then(OsString::new),
                // If a list flag occurs twice, the second list is appended to the first.
                false => matches.get_many::<OsString>(name).map(|texts| {
                    let texts: Vec<OsString> = texts.cloned().collect();
                    texts.join(",".as_ref())
                }),
            };
            if let Some(text) = text {
                self.given.insert(name, text);
            }
        }
        Ok(())
    }
}

impl Flags {
    /// The checked options of the run.
    pub fn config(&self) -> Result<TrainConfig, Failure> {
        let mut c = match &self.config {
            Some(path) => TrainConfig::read(path).map_err(|e| Failure::usage(chain(&e)))?,
            None => TrainConfig::default(),
        };
        self.options.apply(&mut c)?;
        if let Some(alpha) = self.alpha {
            c.lora_parameters.scale = alpha / c.lora_parameters.rank.max(1) as f32;
            c.given.scale = true;
        }
        self.put_schedule(&mut c);
        // mlx-lm requires `--train` or `--test`. Here, training is the default; `--test` alone does
        // not train, as in mlx-lm.
        c.train |= !c.test;
        if c.data.is_none() {
            let file = if c.train { "train.jsonl" } else { "test.jsonl" };
            return Err(Failure::usage(format!(
                "--data is missing: a directory with {file}"
            )));
        }
        if c.resume_adapter_file.is_some() && self.alpha.is_some() && !self.options.has("rank") {
            return Err(Failure::usage(
                "--alpha means nothing without the rank of the adapter to begin with; add --rank, or give --scale",
            ));
        }
        if c.train && c.adapter_path.as_os_str().is_empty() {
            return Err(Failure::usage("--adapter-path must name a directory"));
        }
        let preference = matches!(
            c.method,
            Method::Dpo | Method::Orpo | Method::Kto | Method::Grpo
        );
        if !preference && (self.options.has("beta") || self.options.has("label_smoothing")) {
            return Err(Failure::usage(
                "--beta and --label-smoothing are about preferences; add --method dpo",
            ));
        }
        if c.method == Method::Grpo && c.train && c.reward_command.is_none() {
            return Err(Failure::usage(
                "--method grpo needs --reward-command, the program that judges replies",
            ));
        }
        c.validate().map_err(|e| Failure::usage(e.to_string()))?;
        metal_backend::train::plan::check(&c).map_err(|e| Failure::usage(format!("{e:#}")))?;
        Ok(c)
    }

    /// A schedule given by flags replaces the schedule of the file. A learning rate without a
    /// schedule replaces only the first number of the file's schedule.
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
            if let Some(first) = schedule.arguments.first_mut()
                && self.options.has("learning_rate")
            {
                *first = rate;
            }
            schedule.warmup = self.warmup.unwrap_or(schedule.warmup);
            schedule.warmup_init = self.warmup_init.unwrap_or(schedule.warmup_init);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use metal_backend::train::Compile;

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
