//! `mlx train`: trains an adapter for a model on examples. The flags are in `flags`.

mod flags;
mod show;

use inference::{CancelToken, LoadOptions};
use metal_backend::train::CONFIG_FILE;
use metal_backend::train::config::TrainConfig;
use metal_backend::train::evaluate::EvalOptions;
use metal_backend::train::run::{Event, Run, Start, Summary, check_start};
#[cfg(unix)]
use metal_backend::train::{STATE_FILE, Together, WEIGHTS_FILE};

use crate::cli::learn::evaluate::Subject;
use crate::cli::learn::train::flags::Flags;
use crate::cli::learn::train::show::Show;
use crate::cli::options::load::{choose_backend, find_model};
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::{cancel_on_signals, exit_code};
use crate::cli::terminal::progress::Spinner;

/// Fine-tune a model on examples, by training an adapter (LoRA or DoRA)
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    flags: Flags,
    /// Resume the interrupted run in --adapter-path; the result is as if it had not been
    /// interrupted
    #[arg(long, conflicts_with = "resume_adapter_file")]
    resume: bool,
    /// Replace the adapter of an earlier run in --adapter-path
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Print a JSON object about the result
    #[arg(long)]
    json: bool,
}

const AFTER_HELP: &str = "\
The data is a directory with train.jsonl, and valid.jsonl and test.jsonl if wanted; a line is
{\"messages\": [...]}, {\"prompt\": ..., \"completion\": ...} or {\"text\": ...};
for --method dpo and orpo {\"prompt\": ..., \"chosen\": ..., \"rejected\": ...};
for --method kto {\"prompt\": ..., \"completion\": ..., \"label\": true}; for grpo {\"prompt\": ...};
for encoders {\"anchor\": ..., \"positive\": ...}, and \"negative\" if wanted.

Ctrl-C saves and exits with 130, SIGTERM with 143; --resume goes on from there. A second one ends at once;
what was saved before stays whole.";

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut config = args.flags.config()?;
    if !config.train {
        return test(args, &config, console);
    }
    let start = args.start();
    // If several processes train together, only rank 0 writes the requested files.
    let own = own_directory(&config, start)?;
    if let Some(own) = &own {
        config.adapter_path = own.path().to_owned();
    }
    check_start(&config.adapter_path, start)?;
    let backend = choose_backend(config.backend.as_deref())?;
    let mut load = LoadOptions::new().with_backend(backend.name());
    load.dtype = config.dtype;
    let path = find_model(config.model.as_deref(), console)?;
    #[cfg(unix)]
    inference_group::join()?;

    tracing::info!(path = %path.display(), backend = backend.name(), "training");
    tracing::debug!(?config, "options");
    let spinner = Spinner::start("loading the model and the data", console);
    let prepared = Run::prepare(&path, &load, config, start);
    drop(spinner);
    let mut run = together(prepared?)?;
    for note in run.notes() {
        console.warn(&format!("warning: {note}"));
    }
    console.note(&introduction(&run, args.resume));

    let cancel = CancelToken::new();
    let guard = console
        .catches_interrupts
        .then(|| cancel_on_signals(&cancel));
    let mut show = Show::start(run.config().iters, run.step(), console);
    let done = run.train(&cancel, &mut |event: &Event<'_>| show.event(event));
    show.end();
    drop(guard);
    let summary = done?;
    print(args, run.config(), &summary, console)?;
    if summary.interrupted {
        let (step, iters) = (summary.step, run.config().iters);
        return Err(Failure::Interrupted {
            message: format!(
                "interrupted after {step} of {iters} steps; all is saved, --resume goes on"
            ),
            code: exit_code(),
        });
    }
    if cancel.is_cancelled() && run.config().test && summary.test.is_none() {
        return Err(Failure::Interrupted {
            message: String::from(
                "the test was interrupted; all steps are made and saved, --test alone measures",
            ),
            code: exit_code(),
        });
    }
    Ok(())
}

/// A temporary directory for the files of a process with rank above 0. For a resumed run, it gets
/// copies of rank 0's files.
#[cfg(unix)]
fn own_directory(config: &TrainConfig, start: Start) -> Result<Option<tempfile::TempDir>, Failure> {
    if inference_group::current().is_none_or(|member| member.rank == 0) {
        return Ok(None);
    }
    let failed = |what: &str, e: std::io::Error| Failure::failed(format!("cannot {what}: {e}"));
    let own = tempfile::tempdir().map_err(|e| failed("make a directory for this process", e))?;
    if start == Start::Resume {
        for name in [CONFIG_FILE, WEIGHTS_FILE, STATE_FILE] {
            std::fs::copy(config.adapter_path.join(name), own.path().join(name))
                .map_err(|e| failed(&format!("read {name}, which all processes need"), e))?;
        }
    }
    Ok(Some(own))
}

#[cfg(not(unix))]
fn own_directory(_: &TrainConfig, _: Start) -> Result<Option<tempfile::TempDir>, Failure> {
    Ok(None)
}

/// Joins the training run with the other processes of the group, if there are any.
#[cfg(unix)]
fn together(run: Run) -> Result<Run, Failure> {
    if inference_group::current().is_none() {
        return Ok(run);
    }
    match Together::started()? {
        Some(together) => Ok(run.with_others(together)?),
        None => Ok(run),
    }
}

#[cfg(not(unix))]
fn together(run: Run) -> Result<Run, Failure> {
    Ok(run)
}

impl Args {
    fn start(&self) -> Start {
        match (self.resume, self.overwrite) {
            (true, _) => Start::Resume,
            (false, true) => Start::Overwrite,
            (false, false) => Start::Fresh,
        }
    }
}

/// `--test` without `--train`: measures on `test.jsonl` and writes nothing, as mlx-lm does.
fn test(args: &Args, config: &TrainConfig, console: &mut Console<'_>) -> Result<(), Failure> {
    if args.resume || args.overwrite {
        return Err(Failure::usage(
            "--test alone does not train, so --resume and --overwrite mean nothing; add --train",
        ));
    }
    let backend = choose_backend(config.backend.as_deref())?;
    let mut load = LoadOptions::new().with_backend(backend.name());
    load.dtype = config.dtype;
    let adapters = &config.adapter_path;
    if !adapters.as_os_str().is_empty() {
        if !adapters.join(CONFIG_FILE).is_file() {
            return Err(Failure::failed(format!(
                "there is no adapter in {}; --train makes one, --adapter-path \"\" tests the model alone",
                adapters.display()
            )));
        }
        load.adapter_path = Some(adapters.clone());
    }
    let subject = Subject {
        model: config.model.as_deref(),
        load,
        data: config.data.clone().unwrap_or_default(),
        config,
        portions: EvalOptions {
            batch_size: config.batch_size,
            batches: usize::try_from(config.test_batches).ok(),
            max_seq_length: config.max_seq_length,
            seed: config.seed,
        },
    };
    subject.measure(args.json, console)
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
        return console.json(&summary.to_json(&config.adapter_path));
    }
    console.note(&format!(
        "{} steps, {} tokens in {:.1} s, {} at most",
        summary.step,
        summary.trained_tokens,
        summary.seconds,
        bytes(summary.peak_memory)
    ));
    if let Some(best) = &summary.best {
        console.note(&format!(
            "the best validation, with loss {:.4}, was after step {}; its adapter is in {}",
            best.loss,
            best.step,
            best.adapter_path.display()
        ));
    }
    console.line(&config.adapter_path.to_string_lossy())
}
