//! The command line of `mlx`: one file a subcommand, and their shared parts.
//!
//! A subcommand parses into its own `Args` and checks everything that needs no model (exit 2). Then
//! it loads and runs (exit 1 on failure). Results go to standard output, everything else to
//! standard error. No model code is here: it all goes through the `inference` contract.

#[cfg(feature = "mlx-backend")]
mod arch;
mod backends;
mod bandwidth;
mod batch;
mod bench;
mod bench_many;
mod bench_plans;
mod bench_profile;
mod bounded;
mod cache_prompt;
mod chat;
mod chat_commands;
mod classify;
mod code;
mod completions;
mod console;
mod context;
#[cfg(feature = "mlx-backend")]
mod convert;
mod create;
mod dialog;
mod embed;
mod engine;
#[cfg(feature = "mlx-backend")]
mod environment;
#[cfg(feature = "mlx-backend")]
mod evaluate;
mod failure;
#[cfg(feature = "mlx-backend")]
mod files;
mod foreign;
#[cfg(feature = "mlx-backend")]
mod fuse;
mod generate;
mod grammar;
mod infer;
mod inspect;
mod interrupt;
#[cfg(all(unix, feature = "mlx-backend"))]
mod launch;
mod lines;
mod list;
mod load;
mod logits;
#[cfg(all(unix, feature = "mlx-backend"))]
mod member;
#[cfg(test)]
mod mock;
mod modelfile;
mod models;
mod names;
mod parameters;
mod perplexity;
#[cfg(all(unix, feature = "mlx-backend"))]
mod ports;
mod preset;
#[cfg(feature = "probe")]
mod probe;
mod progress;
mod prompt;
mod pull;
mod push;
mod records;
mod remote;
mod remove;
mod reply;
mod rerank;
mod run;
mod sampling;
mod screen;
mod screen_table;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod serve_defaults;
#[cfg(feature = "serve")]
mod serve_models;
mod session;
mod settings;
#[cfg(feature = "mlx-backend")]
mod show;
#[cfg(feature = "mlx-backend")]
mod standalone;
mod steer;
#[cfg(feature = "mlx-backend")]
mod tasks;
mod terminal;
mod tools;
#[cfg(feature = "probe")]
mod trace;
#[cfg(feature = "probe")]
mod trace_patch;
#[cfg(feature = "mlx-backend")]
mod train;
#[cfg(feature = "mlx-backend")]
mod train_flags;
#[cfg(feature = "mlx-backend")]
mod train_show;
mod version;
#[cfg(feature = "probe")]
mod vindex;
#[cfg(feature = "probe")]
mod vindex_build;
#[cfg(feature = "probe")]
mod vindex_sweep;
#[cfg(feature = "probe")]
mod vindex_weights;
mod wrap;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use console::Console;
use failure::Failure;

/// Freed bytes that the process keeps for its next allocations: about the keys and values of some
/// prompts in one batch.
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
    /// No progress and no statistics on standard error
    // No short form: `-q` is `--quantize` in mlx-lm's convert, and silently copying there misleads.
    #[arg(long, global = true)]
    quiet: bool,
    /// Of mlx-lm: no code of a model is ever run here
    #[arg(long, global = true, hide = true)]
    trust_remote_code: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Generate(generate::Args),
    Chat(chat::Args),
    #[cfg(feature = "serve")]
    Serve(serve::Args),
    Batch(batch::Args),
    Classify(classify::Args),
    Embed(embed::Args),
    Rerank(rerank::Args),
    CachePrompt(cache_prompt::Args),
    Logits(logits::Args),
    Infer(infer::Args),
    Perplexity(perplexity::Args),
    #[cfg(feature = "probe")]
    Probe(probe::Args),
    #[cfg(feature = "probe")]
    Trace(trace::Args),
    #[cfg(feature = "probe")]
    Vindex(vindex::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(visible_alias = "lora")]
    Train(Box<train::Args>),
    #[cfg(all(unix, feature = "mlx-backend"))]
    Launch(launch::Args),
    #[cfg(feature = "mlx-backend")]
    Evaluate(evaluate::Args),
    #[cfg(feature = "mlx-backend")]
    Fuse(fuse::Args),
    Backends(backends::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(visible_alias = "architectures")]
    Arch(arch::Args),
    Models(models::Args),
    #[cfg(feature = "mlx-backend")]
    Show(show::Args),
    Inspect(inspect::Args),
    #[cfg(feature = "mlx-backend")]
    Convert(convert::Args),
    Create(create::Args),
    Pull(pull::Args),
    Push(push::Args),
    Ps(remote::PsArgs),
    Stop(remote::StopArgs),
    #[command(visible_alias = "list")]
    Ls(list::Args),
    Rm(remove::Args),
    #[command(visible_alias = "benchmark")]
    Bench(bench::Args),
    #[cfg(feature = "mlx-backend")]
    #[command(name = "self")]
    Standalone(standalone::Args),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

/// Flags that `--help` shows and `-h` does not: most people never need them.
const RARE: [&str; 44] = [
    "all",
    "alpha",
    "attention_sums",
    "banned_tokens",
    "beta",
    "chat_feature",
    "chat_template",
    "chat_template_config",
    "completion_feature",
    "compile",
    "deadline",
    "dropout",
    "extra_eos_token",
    "forced_tokens",
    "gguf_path",
    "gguf_type",
    "grammar",
    "grammar_file",
    "json_schema_file",
    "keep_order",
    "keys",
    "kv_bits",
    "kv_group_size",
    "label_smoothing",
    "logit_bias",
    "lr_end",
    "lr_steps",
    "max_grad_norm",
    "max_shard_size",
    "min_tokens",
    "num_draft_tokens",
    "pack",
    "prefill_response",
    "prefill_step_size",
    "prompt_feature",
    "prompt_lookup",
    "quantized_kv_start",
    "regex",
    "skip_bad_lines",
    "steer",
    "text_feature",
    "test_batches",
    "tools",
    "warmup_init",
];

/// The command line. Values may begin with a minus and a digit. So `--top-k -3` is reported as out
/// of range, not as an unknown flag. `-h` leaves out rare flags, and says so.
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

/// Runs the program and gives its exit code.
pub fn main() -> ExitCode {
    let given = match names::translate(std::env::args_os()) {
        Ok(given) => given,
        Err(failure) => return ExitCode::from(finish(Err(failure), false, &mut std::io::stderr())),
    };
    let mut line = command();
    if given.iter().any(|arg| arg == "--version") {
        // Finding the linked backends takes a moment that other commands need not spend.
        line = line.long_version(&*version::long().leak());
    }
    // Wrong command lines exit with 2 here, help and version with 0.
    let matches = match line.try_get_matches_from_mut(&given) {
        Ok(matches) => matches,
        Err(e) => match foreign::advice(&e, &given) {
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
    if let Err(failure) = environment::check() {
        return ExitCode::from(finish(
            Err(failure),
            cli.verbose > 0,
            &mut std::io::stderr(),
        ));
    }
    // What a pass frees the next one takes; no other program is in this process.
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
    // Standard input stays unlocked: on a terminal it cannot drive, the chat's line editor locks it
    // itself.
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
    if let Some(member) = member::current() {
        // One of several processes speaks. Their input, where it is not ours to begin with, would
        // reach one of them.
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
        Command::Run(args) => run::run(args, &mut console),
        Command::Generate(args) => generate::run(args, &mut console),
        Command::Chat(args) => chat::run(args, &mut console),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(args, &mut console),
        Command::Batch(args) => batch::run(args, &mut console),
        Command::Classify(args) => classify::run(args, &mut console),
        Command::Embed(args) => embed::run(args, &mut console),
        Command::Rerank(args) => rerank::run(args, &mut console),
        Command::CachePrompt(args) => cache_prompt::run(args, &mut console),
        Command::Logits(args) => logits::run(args, &mut console),
        Command::Infer(args) => infer::run(args, &mut console),
        Command::Perplexity(args) => perplexity::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Probe(args) => probe::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Trace(args) => trace::run(args, &mut console),
        #[cfg(feature = "probe")]
        Command::Vindex(args) => vindex::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Train(args) => train::run(args, &mut console),
        #[cfg(all(unix, feature = "mlx-backend"))]
        Command::Launch(args) => launch::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Evaluate(args) => evaluate::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Fuse(args) => fuse::run(args, &mut console),
        Command::Backends(args) => backends::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Arch(args) => arch::run(args, &mut console),
        Command::Models(args) => models::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Show(args) => show::run(args, &mut console),
        Command::Inspect(args) => inspect::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Convert(args) => convert::run(args, &mut console),
        Command::Create(args) => create::run(args, &mut console),
        Command::Pull(args) => pull::run(args, &mut console),
        Command::Push(args) => push::run(args, &mut console),
        Command::Ps(args) => remote::ps(args, &mut console),
        Command::Stop(args) => remote::stop(args, &mut console),
        Command::Ls(args) => list::run(args, &mut console),
        Command::Rm(args) => remove::run(args, &mut console),
        Command::Bench(args) => bench::run(args, &mut console),
        #[cfg(feature = "mlx-backend")]
        Command::Standalone(args) => standalone::run(args, &mut console),
        Command::Completions(args) => completions::run(args, &mut console),
        Command::Man(args) => completions::man(args, &mut console),
    };
    let code = finish(done, cli.verbose > 0, &mut err);
    #[cfg(all(unix, feature = "mlx-backend"))]
    if code == 0 {
        member::leave();
    }
    ExitCode::from(code)
}

#[cfg(all(unix, feature = "mlx-backend"))]
impl Command {
    /// Finds the group that this process was started in, where the command is one that several
    /// processes run together. It joins before it loads a model.
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
        member::follow_launcher();
        member::find()
    }

    /// Refuses what several processes that divide a model cannot do, as far as the flags tell.
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

/// Reports a failure and chooses the exit code. `verbose` also shows where MLX was looked for.
fn finish(done: Result<(), Failure>, verbose: bool, err: &mut dyn Write) -> u8 {
    let Err(failure) = done else { return 0 };
    // Without the engine there is no library that was looked for.
    let _ = verbose;
    if let Some(text) = failure.report() {
        // Without standard error no message can be shown.
        let columns = std::io::stderr()
            .is_terminal()
            .then(terminal::error_columns);
        let text = wrap::wrapped(&format!("error: {text}"), columns.flatten().unwrap_or(0));
        let _ = writeln!(err, "{text}");
        #[cfg(feature = "mlx-backend")]
        if let (Failure::Failed(_), Some(hint)) = (&failure, standalone::hint()) {
            let _ = writeln!(err, "{hint}");
            for place in mlx_rs_core::library::searched().iter().filter(|_| verbose) {
                let _ = writeln!(err, "searched {place}");
            }
        }
    }
    failure.exit_code()
}

impl Command {
    /// The log level, where the command has a flag for it.
    fn log_level(&self) -> Option<&'static str> {
        match self {
            #[cfg(feature = "serve")]
            Self::Serve(args) => args.log_level(),
            _ => None,
        }
    }
}

/// Sends log messages to standard error: warnings, or more with `-v` or `RUST_LOG`, or those of a
/// command's own flag.
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
