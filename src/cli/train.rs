//! `mlx train`: a model and examples in, an adapter out. The flags are `train_flags`'.

use std::path::PathBuf;

use inference::{CancelToken, LoadOptions};
use metal_backend::train::config::TrainConfig;
use metal_backend::train::journal::Score;
use metal_backend::train::run::{Event, Run, Summary};
use serde_json::{Value, json};

use super::console::{Console, bytes};
use super::failure::Failure;
use super::interrupt::cancel_on_interrupt;
use super::load::{choose_backend, find_model};
use super::progress::Spinner;
use super::train_flags::Flags;
use super::train_show::Show;

/// Fine-tune a model on examples: an adapter (LoRA or DoRA) for it
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    flags: Flags,
    /// Go on with the interrupted run in --adapter-path, as if it had not been interrupted
    #[arg(long, conflicts_with = "resume_adapter_file")]
    resume: bool,
    /// Print a JSON object of what came of it
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
The data is a directory with train.jsonl, and valid.jsonl and test.jsonl if wanted; a line is
{\"messages\": [...]}, {\"prompt\": ..., \"completion\": ...} or {\"text\": ...}.

Ctrl-C saves and exits with 130; --resume goes on from there. A second Ctrl-C ends at once; what was saved
before stays whole.";

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let config = args.flags.config()?;
    let backend = choose_backend(config.backend.as_deref())?;
    let mut load = LoadOptions::new().with_backend(backend.name());
    load.dtype = config.dtype;
    let path = find_model(config.model.as_deref(), console)?;

    let spinner = Spinner::start("loading the model and the data", console);
    let prepared = Run::prepare(&path, &load, config, args.resume);
    drop(spinner);
    let mut run = prepared?;
    for note in run.notes() {
        console.warn(&format!("warning: {note}"));
    }
    console.note(&introduction(&run, args.resume));

    let cancel = CancelToken::new();
    let guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let mut show = Show::start(run.config().iters, run.step(), console);
    let done = run.train(&cancel, &mut |event: &Event<'_>| show.event(event));
    show.end();
    drop(guard);
    let summary = done?;
    print(args, run.config(), &summary, console)?;
    if summary.interrupted {
        return Err(Failure::Interrupted(format!(
            "interrupted after {} of {} steps; all is saved, --resume goes on",
            summary.step,
            run.config().iters
        )));
    }
    Ok(())
}

fn introduction(run: &Run, resumed: bool) -> String {
    use inference::Adapter as _;
    let info = run.trainer().model().info();
    let numbers = run.trainer().adapter().num_parameters();
    let [train, valid, test] = run.examples();
    let go = if resumed { "going on after" } else { "from" };
    format!(
        "{}: {numbers} of {} numbers are trained ({:.3} %), on {}; {train} examples, {valid} to validate, {test} to \
         test; {go} step {} of {}",
        info.architecture,
        info.parameters,
        100.0 * numbers as f64 / info.parameters.max(1) as f64,
        info.device,
        run.step(),
        run.config().iters
    )
}

fn print(
    args: &Args,
    config: &TrainConfig,
    summary: &Summary,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    if args.json {
        return console.json(&json!({
            "adapter_path": config.adapter_path,
            "steps": summary.step,
            "interrupted": summary.interrupted,
            "train_loss": summary.train_loss,
            "base": summary.base.as_ref().map(score),
            "validation": summary.validation.as_ref().map(score),
            "test": summary.test.as_ref().map(score),
            "trained_tokens": summary.trained_tokens,
            "trainable_parameters": summary.trainable_parameters,
            "seconds": summary.seconds,
            "peak_memory_bytes": summary.peak_memory,
        }));
    }
    console.note(&format!(
        "{} steps, {} tokens in {:.1} s, {} at most",
        summary.step,
        summary.trained_tokens,
        summary.seconds,
        bytes(summary.peak_memory)
    ));
    console.line(&config.adapter_path.to_string_lossy())
}

/// A score for scripts.
pub fn score(score: &Score) -> Value {
    json!({
        "loss": score.loss,
        "perplexity": score.perplexity,
        "accuracy": score.accuracy,
        "tokens": score.tokens,
        "seconds": score.seconds,
    })
}

/// A score for people.
pub fn told(score: &Score) -> String {
    let perplexity = score
        .perplexity
        .map_or_else(|| String::from("beyond numbers"), |p| format!("{p:.3}"));
    format!(
        "loss {:.4}, perplexity {perplexity}, accuracy {:.1} % of {} tokens",
        score.loss,
        100.0 * score.accuracy,
        score.tokens
    )
}

/// A directory that must not be empty text.
pub fn directory(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("must name a directory".into());
    }
    Ok(PathBuf::from(text))
}
