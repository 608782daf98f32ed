//! The command line of `mlx`: one file for each subcommand, and their shared parts.
//!
//! A subcommand parses into its own `Args` and checks everything that needs no model (exit 2). Then
//! it loads and runs (exit 1 on failure). Results go to standard output, everything else to
//! standard error. The command line contains no model code: it calls models only through the
//! `inference` contract.

mod completions;
mod learn;
mod measure;
#[cfg(test)]
mod mock;
mod models;
mod options;
mod serve;
mod talk;
mod terminal;
mod version;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use terminal::console::Console;
use terminal::failure::Failure;

/// Number of freed bytes that the process keeps for later allocations: about the size of the KV
/// caches of some prompts in one batch.
#[cfg(feature = "mlx-backend")]
const FREED: usize = 256 << 20;

const AFTER_HELP: &str = "\
Exit codes: 0 done, or the reader of our output went away; 2 the command line is wrong; 130 Ctrl-C
(`train` saves before; 143: by SIGTERM); 1 anything else.

Environment: MLX_BACKEND (as --backend), MLX_CACHE_DIR (where known models are kept), MLX_OFFLINE=1
(never fetch), MLX_RANK and MLX_HOSTFILE (of a group: see `mlx launch`), MLX_PYTHON (the Python whose pip fetches), MLXLM_PYTHON (the Python of the backend mlx_lm),
MLX_API_KEY (as serve's --api-key), MLX_SERVER (as --server of ps and stop), HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE (as for Python's huggingface_hub), RUST_LOG
(log filter, as -v).";

/// Runs language models on MLX.
#[derive(Debug, Parser)]
#[command(name = "mlx", version, after_help = AFTER_HELP, arg_required_else_help = true)]
struct Cli {
    /// Log to standard error: -v steps, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// Show no progress and no statistics on standard error
    // There is no short form: `-q` means `--quantize` in mlx-lm's convert. As `--quiet`, it would
    // silently copy the model without quantizing it.
    #[arg(long, global = true)]
    quiet: bool,
    /// mlx-lm's flag; it has no effect, because this program never runs code of a model
    #[arg(long, global = true, hide = true)]
    trust_remote_code: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(talk::run::Args),
    Generate(talk::generate::Args),
    Chat(talk::chat::Args),
    #[cfg(feature = "serve")]
    Serve(serve::command::Args),
    Batch(talk::batch::Args),
    Classify(talk::classify::Args),
    Embed(talk::embed::Args),
    Rerank(talk::rerank::Args),
    CachePrompt(talk::cache_prompt::Args),
    Logits(measure::logits::Args),
    Infer(talk::infer::Args),
    Perplexity(measure::perplexity::Args),
    #[cfg(feature = "probe")]
    Probe(measure::probe::Args),
    #[cfg(feature = "probe")]
    Trace(measure::trace::Args),
    #[cfg(feature = "probe")]
    Vindex(measure::vindex::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(visible_alias = "lora")]
    Train(Box<learn::train::Args>),
    #[cfg(all(unix, feature = "mlx-backend"))]
    Launch(serve::launch::Args),
    #[cfg(feature = "mlx-backend")]
    Evaluate(learn::evaluate::Args),
    #[cfg(feature = "mlx-backend")]
    Fuse(learn::fuse::Args),
    Backends(models::backends::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(visible_alias = "architectures")]
    Arch(models::arch::Args),
    Models(models::directory::Args),
    #[cfg(feature = "mlx-backend")]
    Show(models::show::Args),
    Inspect(models::inspect::Args),
    #[cfg(feature = "mlx-backend")]
    Convert(models::convert::Args),
    Create(models::create::Args),
    Pull(models::pull::Args),
    Push(models::push::Args),
    Ps(serve::remote::PsArgs),
    Stop(serve::remote::StopArgs),
    #[command(visible_alias = "list")]
    Ls(models::list::Args),
    Rm(models::remove::Args),
    #[command(visible_alias = "benchmark")]
    Bench(measure::bench::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(name = "self")]
    Standalone(models::standalone::Args),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

/// Flags that `--help` shows and `-h` omits, because most users never need them.
const RARE: [&str; 61] = [
    "all",
    "alpha",
    "anchor_prompt_name",
    "attention_sums",
    "banned_tokens",
    "beta",
    "chat_feature",
    "chat_template",
    "chat_template_config",
    "completion_feature",
    "compile",
    "deadline",
    "desirable_weight",
    "dropout",
    "early_stopping_threshold",
    "epsilon",
    "epsilon_high",
    "extra_eos_token",
    "forced_tokens",
    "gguf_path",
    "grammar",
    "grammar_file",
    "json_schema_file",
    "keep_order",
    "keys",
    "kv_bits",
    "kv_group_size",
    "label_smoothing",
    "logit_bias",
    "loss_type",
    "lr_end",
    "lr_steps",
    "max_completion_length",
    "max_grad_norm",
    "max_shard_size",
    "mcp_max_rounds",
    "mcp_timeout",
    "min_tokens",
    "num_draft_tokens",
    "num_generations",
    "num_iterations",
    "pack",
    "positive_prompt_name",
    "prefill_response",
    "prefill_step_size",
    "prompt_feature",
    "prompt_lookup",
    "quantized_kv_start",
    "regex",
    "save_layers",
    "save_tier",
    "save_window",
    "scale_rewards",
    "similarity_scale",
    "skip_bad_lines",
    "steer",
    "text_feature",
    "test_batches",
    "tools",
    "undesirable_weight",
    "warmup_init",
];

/// The command line. Values may begin with a minus and a digit, so `--top-k -3` is reported as out
/// of range, not as an unknown flag. `-h` leaves out rare flags and says so.
fn command() -> clap::Command {
    fn all(command: clap::Command) -> clap::Command {
        let rare = |arg: &clap::Arg| RARE.contains(&arg.get_id().as_str());
        let shortened = command.get_arguments().any(rare);
        let command = command
            .mut_args(|arg| {
                let hidden = arg.is_hide_short_help_set() || rare(&arg);
                let takes = arg.get_action().takes_values();
                let arg = arg.hide_short_help(hidden);
                if takes {
                    arg.allow_negative_numbers(true)
                } else {
                    arg
                }
            })
            .mut_subcommands(all);
        if shortened && command.get_after_help().is_none() {
            return command
                .after_long_help("")
                .after_help("`--help` shows all flags; these are the usual ones.");
        }
        command
    }
    all(Cli::command())
}

/// Runs the program and returns its exit code.
pub fn main() -> ExitCode {
    let given = match options::names::translate(std::env::args_os()) {
        Ok(given) => given,
        Err(failure) => return ExitCode::from(finish(Err(failure), false, &mut std::io::stderr())),
    };
    let mut line = command();
    if given.iter().any(|arg| arg == "--version") {
        // Finding the linked backends takes a moment, so only this command does it.
        line = line.long_version(&*version::long().leak());
    }
    // clap exits here: with 2 for a wrong command line, with 0 for help and version.
    let matches = match line.try_get_matches_from_mut(&given) {
        Ok(matches) => matches,
        Err(e) => match options::foreign::advice(&e, &given) {
            Some(text) => {
                let failure = Failure::Failed(anyhow::Error::msg(text));
                finish(Err(failure), false, &mut std::io::stderr());
                return ExitCode::from(2);
            }
            None => e.exit(),
        },
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(e) => e.exit(),
    };
    start_log(cli.verbose, cli.command.log_level());
    #[cfg(feature = "mlx-backend")]
    if let Err(failure) = options::environment::check() {
        return ExitCode::from(finish(
            Err(failure),
            cli.verbose > 0,
            &mut std::io::stderr(),
        ));
    }
    // Keeps freed memory for the next pass. The setting affects the whole process, which contains
    // no other program.
    #[cfg(feature = "mlx-backend")]
    metal_backend::keep_freed(FREED);
    #[cfg(all(unix, feature = "mlx-backend"))]
    if let Err(failure) = cli.command.find_group() {
        return ExitCode::from(finish(
            Err(failure),
            cli.verbose > 0,
            &mut std::io::stderr(),
        ));
    }
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    // Standard input stays unlocked: the chat's line editor locks it on a terminal that it cannot
    // control.
    let mut input = std::io::BufReader::new(std::io::stdin());
    let (mut out, mut err) = (stdout.lock(), &stderr);
    #[cfg(all(unix, feature = "mlx-backend"))]
    let (mut nothing, mut nowhere) = (std::io::empty(), std::io::sink());
    let mut console = Console {
        input: &mut input,
        out: &mut out,
        err: &mut err,
        in_is_terminal: stdin.is_terminal(),
        out_is_terminal: stdout.is_terminal(),
        err_is_terminal: stderr.is_terminal(),
        quiet: cli.quiet,
        verbose: cli.verbose > 0,
        catches_interrupts: true,
    };
    #[cfg(all(unix, feature = "mlx-backend"))]
    if let Some(member) = inference_group::current() {
        // Only rank 0 of several processes prints. No process reads standard input, because only
        // one of them would receive it.
        console.input = &mut nothing;
        console.in_is_terminal = false;
        if member.rank > 0 {
            console.out = &mut nowhere;
            console.quiet = true;
        }
    }
    if cli.trust_remote_code {
        console.note("note: --trust-remote-code changes nothing; no code of a model is ever run");
    }
    let done = match &cli.command {
        Command::Run(args) => talk::run::run(args, &mut console),
        Command::Generate(args) => talk::generate::run(args, &mut console),
        Command::Chat(args) => talk::chat::run(args, &mut console),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::command::run(args, &mut console),
        Command::Batch(args) => talk::batch::run(args, &mut console),
        Command::Classify(args) => talk::classify::run(args, &mut console),
        Command::Embed(args) => talk::embed::run(args, &mut console),
        Command::Rerank(args) => talk::rerank::run(args, &mut console),
        Command::CachePrompt(args) => talk::cache_prompt::run(args, &mut console),
        Command::Logits(args) => measure::logits::run(args, &mut console),
        Command::Infer(args) => talk::infer::run(args, &mut console),
        Command::Perplexity(args) => measure::perplexity::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Probe(args) => measure::probe::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Trace(args) => measure::trace::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Vindex(args) => measure::vindex::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Train(args) => learn::train::run(args, &mut console),
        #[cfg(all(unix, feature = "mlx-backend"))]
        Command::Launch(args) => serve::launch::run(args, check_launched, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Evaluate(args) => learn::evaluate::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Fuse(args) => learn::fuse::run(args, &mut console),
        Command::Backends(args) => models::backends::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Arch(args) => models::arch::run(args, &mut console),
        Command::Models(args) => models::directory::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Show(args) => models::show::run(args, &mut console),
        Command::Inspect(args) => models::inspect::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Convert(args) => models::convert::run(args, &mut console),
        Command::Create(args) => models::create::run(args, &mut console),
        Command::Pull(args) => models::pull::run(args, &mut console),
        Command::Push(args) => models::push::run(args, &mut console),
        Command::Ps(args) => serve::remote::ps(args, &mut console),
        Command::Stop(args) => serve::remote::stop(args, &mut console),
        Command::Ls(args) => models::list::run(args, &mut console),
        Command::Rm(args) => models::remove::run(args, &mut console),
        Command::Bench(args) => measure::bench::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Standalone(args) => models::standalone::run(args, &mut console),
        Command::Completions(args) => completions::run(args, command(), &mut console),
        Command::Man(args) => completions::man(args, command(), &mut console),
    };
    let code = finish(done, cli.verbose > 0, &mut err);
    #[cfg(all(unix, feature = "mlx-backend"))]
    match code {
        0 => inference_group::leave(),
        _ => inference_group::fail(),
    }
    ExitCode::from(code)
}

#[cfg(all(unix, feature = "mlx-backend"))]
impl Command {
    /// Finds the group of this process, if the command can run in several processes. It joins the
    /// group before it loads a model.
    fn find_group(&self) -> Result<(), Failure> {
        match self {
            Command::Generate(_)
            | Command::Logits(_)
            | Command::Perplexity(_)
            | Command::Bench(_)
            | Command::Train(_) => {}
            #[cfg(feature = "serve")]
            Command::Serve(_) => {}
            _ => return Ok(()),
        }
        inference_group::follow_launcher();
        Ok(inference_group::find()?)
    }

    /// Refuses requests that several processes with a divided model cannot serve, as far as the
    /// flags show.
    fn check_together(&self, split: inference::Split) -> Result<(), Failure> {
        match self {
            Self::Generate(args) if !args.has_prompt() => Err(Failure::usage(
                "there is no prompt: give PROMPT, --prompt or --tokens; standard input cannot be \
                 shared by several processes",
            )),
            Self::Generate(args) => args.load.check_split(split),
            Self::Logits(args) => args.load.check_split(split),
            Self::Perplexity(args) => args.load.check_split(split),
            Self::Bench(args) => args.load.check_split(split),
            #[cfg(feature = "serve")]
            Self::Serve(args) => args.check_together(split),
            _ => Ok(()),
        }
    }
}

/// Parses the command line that `mlx launch` will start, checks that several processes can run it,
/// and returns the command's name.
#[cfg(all(unix, feature = "mlx-backend"))]
fn check_launched(given: &[String], split: inference::Split) -> Result<String, Failure> {
    let given = std::iter::once("mlx").chain(given.iter().map(String::as_str));
    let matches = match command().try_get_matches_from(given) {
        Ok(matches) => matches,
        Err(e) => e.exit(),
    };
    let cli = Cli::from_arg_matches(&matches).map_err(|e| Failure::usage(e.to_string()))?;
    cli.command.check_together(split)?;
    Ok(matches.subcommand_name().unwrap_or_default().to_owned())
}

/// Reports a failure and chooses the exit code. `verbose` also shows the places where MLX was
/// searched.
fn finish(done: Result<(), Failure>, verbose: bool, err: &mut dyn Write) -> u8 {
    let Err(failure) = done else { return 0 };
    // Without the engine, no library is searched.
    let _ = verbose;
    if let Some(text) = failure.report() {
        // Without standard error no message can be shown.
        let columns = std::io::stderr()
            .is_terminal()
            .then(terminal::tty::error_columns);
        let text =
            terminal::wrap::wrapped(&format!("error: {text}"), columns.flatten().unwrap_or(0));
        let _ = writeln!(err, "{text}");
        #[cfg(feature = "mlx-backend")]
        if let (Failure::Failed(_), Some(hint)) = (&failure, models::standalone::hint()) {
            let _ = writeln!(err, "{hint}");
            for place in mlx_rs_core::library::searched().iter().filter(|_| verbose) {
                let _ = writeln!(err, "searched {place}");
            }
        }
    }
    failure.exit_code()
}

impl Command {
    /// The log level, if the command has a flag for it.
    fn log_level(&self) -> Option<&'static str> {
        match self {
            #[cfg(feature = "serve")]
            Self::Serve(args) => args.log_level(),
            _ => None,
        }
    }
}

/// Sends log messages to standard error: warnings, or more with `-v`, `RUST_LOG` or the command's
/// own flag.
fn start_log(verbose: u8, flag: Option<&str>) {
    use tracing_subscriber::EnvFilter;
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if verbose == 0 && flag.is_none() && !text.is_empty() => EnvFilter::new(text),
        _ => EnvFilter::new(flag.unwrap_or(level)),
    };
    let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(color)
        .log_internal_errors(false)
        .init();
}

#[cfg(all(test, feature = "mlx-backend"))]
mod compat_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn exit_codes_are_0_1_and_2() {
        let mut err = Vec::new();
        assert_eq!(finish(Ok(()), false, &mut err), 0);
        assert_eq!(finish(Err(Failure::PipeClosed), false, &mut err), 0);
        assert!(err.is_empty());
        assert_eq!(finish(Err(Failure::usage("bad")), false, &mut err), 2);
        let failed = inference::Error::new(inference::ErrorKind::Engine, "broke");
        assert_eq!(finish(Err(failed.into()), false, &mut err), 1);
        let text = String::from_utf8(err).unwrap();
        assert!(
            text.contains("error: bad") && text.contains("error: broke"),
            "{text}"
        );
    }
}
