//! `mlx evaluate`: measures a model on a data set in the format of training data. `tasks.rs` runs
//! tasks of lm-eval.

use std::path::PathBuf;

use inference::{CancelToken, LoadOptions};
use metal_backend::train::config::TrainConfig;
use metal_backend::train::evaluate::{EvalOptions, evaluate};
use serde_json::json;

use crate::cli::learn::common::{directory, told};
use crate::cli::learn::tasks::{self, TaskArgs};
use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, find_model};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::{CountBar, Spinner};

/// Measure loss, perplexity and accuracy on a data set, or run tasks of lm-eval
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("subject").required(true).args(["data", "tasks"])))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// A JSONL or Parquet file, or a directory with test.jsonl; lines as for `mlx train`
    #[arg(long, short, value_name = "PATH", value_parser = directory)]
    data: Option<PathBuf>,
    /// Count only the last message of a chat, or the completion
    #[arg(long)]
    mask_prompt: bool,
    /// Number of examples in a batch
    #[arg(long, value_name = "N", default_value = "4", value_parser = at_least_one)]
    batch_size: usize,
    /// Maximum number of batches, drawn by --seed [default: all]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    test_batches: Option<usize>,
    /// Maximum tokens of an example; longer examples are truncated
    #[arg(long, value_name = "N", default_value = "2048", value_parser = at_least_one)]
    max_seq_length: usize,
    /// Seed for drawing batches, and examples of tasks [default: 0, for tasks 123]
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Skip lines that cannot be used, instead of stopping
    #[arg(long)]
    skip_bad_lines: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    tasks: TaskArgs,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let Some(data) = &args.data else {
        return tasks::run(&args.tasks, &args.model, &args.load, args.seed, console);
    };
    if args.max_seq_length < 2 {
        return Err(Failure::usage(
            "--max-seq-length must be at least 2: one token to read and one to predict",
        ));
    }
    let backend = args.load.backend()?;
    let options = args.load.checked(backend.name())?;
    let subject = Subject {
        model: args.model.model.as_deref(),
        load: options,
        data: data.clone(),
        config: &TrainConfig {
            mask_prompt: args.mask_prompt,
            skip_bad_lines: args.skip_bad_lines,
            batch_size: args.batch_size,
            ..TrainConfig::default()
        },
        portions: EvalOptions {
            batch_size: args.batch_size,
            batches: args.test_batches,
            max_seq_length: args.max_seq_length,
            seed: args.seed.unwrap_or_default(),
        },
    };
    subject.measure(args.json, console)
}

/// What to measure. `mlx train --test` also uses this.
pub struct Subject<'a> {
    /// The model, as `--model` names it.
    pub model: Option<&'a str>,
    /// The load options, with the adapter if there is one.
    pub load: LoadOptions,
    /// A JSONL file, or a directory with `test.jsonl`.
    pub data: PathBuf,
    /// The method with its parameters, and how lines are read.
    pub config: &'a TrainConfig,
    /// The part of the data to measure, and its batches.
    pub portions: EvalOptions,
}

impl Subject<'_> {
    /// Measures the model and prints the result.
    pub fn measure(&self, as_json: bool, console: &mut Console<'_>) -> Result<(), Failure> {
        let path = find_model(self.model, console)?;
        let cancel = CancelToken::new();
        let guard = console
            .catches_interrupts
            .then(|| cancel_on_interrupt(&cancel));
        let mut spinner = Some(Spinner::start("loading the model and the data", console));
        let mut bar = None;
        let on_batch = &mut |_, total| {
            spinner = None;
            bar.get_or_insert_with(|| CountBar::start("batches", total, console))
                .advance(1);
        };
        let (load, data, options) = (&self.load, &self.data, &self.portions);
        let measured = evaluate(&path, load, data, self.config, options, &cancel, on_batch);
        drop((spinner, bar, guard));
        let measured = measured?;
        for note in &measured.notes {
            console.warn(&format!("warning: {note}"));
        }
        if as_json {
            let mut object = measured.score.to_json();
            object["examples"] = json!(measured.examples);
            return console.json(&object);
        }
        console.line(&told(&measured.score))
    }
}
