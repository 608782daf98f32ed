//! `mlx evaluate --tasks`: runs tasks of lm-eval's harness on a model, like `mlx_lm.evaluate`.
//!
//! The harness is the Python package `lm_eval`; the user provides the Python. The harness runs in a
//! subprocess, where it loads the tasks and their data. It requests scores through two pipes
//! (`lm_eval.py`). Scores follow mlx-lm's definitions.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use inference::{
    CancelToken, ChatEnd, ChatPrompt, GenerateOptions, Interrupt, Message, Prompt, TextModel,
    TokenModel,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::options::dialog::Names;
use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

const SCRIPT: &str = include_str!("lm_eval.py");
/// The variable with the path of the interpreter, as for the backend `mlx_lm`.
const PYTHON: &str = "MLXLM_PYTHON";
/// mlx-lm's seed for tasks.
const SEED: u32 = 123;
/// Maximum number of tokens in a reply, if neither the task nor a flag sets a limit.
const MAX_TOKENS: usize = 8192;

/// The tasks to run, and their options.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Tasks of lm-eval")]
pub struct TaskArgs {
    /// Run these tasks of lm-eval (the Python package lm_eval) instead of measuring --data
    #[arg(long, value_name = "TASK", num_args = 1..)]
    pub tasks: Vec<String>,
    /// Maximum number of examples of each task
    #[arg(long, value_name = "N", requires = "tasks", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Number of solved examples in each prompt [default: the task's own number]
    #[arg(long, value_name = "N", requires = "tasks")]
    pub num_shots: Option<usize>,
    /// A directory with your own tasks, in lm-eval's YAML format
    #[arg(long, value_name = "DIR", requires = "tasks")]
    pub include_path: Option<PathBuf>,
    /// Write the results to a file in this directory, too, named as mlx-lm names it
    #[arg(long, value_name = "DIR", requires = "tasks")]
    pub output_dir: Option<PathBuf>,
    /// Maximum tokens of a reply, whatever the task says
    #[arg(long, value_name = "N", requires = "tasks", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Format prompts with the model's chat template [default: if the model has one]
    #[arg(long, requires = "tasks", overrides_with = "no_apply_chat_template")]
    pub apply_chat_template: bool,
    /// Do not format prompts with a chat template
    #[arg(long, requires = "tasks")]
    pub no_apply_chat_template: bool,
    /// Variables for the chat template, as a JSON object
    #[arg(
        long,
        alias = "chat-template-config",
        value_name = "JSON",
        requires = "tasks"
    )]
    pub chat_template_args: Option<Names>,
    /// Make the solved examples turns of a conversation
    #[arg(long, requires = "tasks")]
    pub fewshot_as_multiturn: bool,
    /// Allow tasks that execute code written by the model
    #[arg(long, requires = "tasks")]
    pub confirm_run_unsafe_code: bool,
    /// Temperature of replies
    #[arg(long, value_name = "T", requires = "tasks", default_value_t = 0.0)]
    pub temp: f32,
    /// Sample from the most likely tokens that together have this probability
    #[arg(long, value_name = "P", requires = "tasks", default_value_t = 1.0)]
    pub top_p: f32,
    /// Sample from this number of most likely tokens; 0 means all
    #[arg(long, value_name = "K", requires = "tasks", default_value_t = 0)]
    pub top_k: usize,
}

/// A request of the harness.
#[derive(Debug, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
enum Ask {
    /// Asks for the log-probability of a text after another text, and whether it is the greedy
    /// reply.
    Score {
        context: String,
        continuation: String,
    },
    /// Asks for the log-probability of a text.
    Roll { text: String },
    /// Asks for a generated reply.
    Generate {
        context: String,
        until: Vec<String>,
        max_tokens: Option<usize>,
    },
    /// Asks for a conversation rendered as text.
    Chat { messages: Vec<Message>, reply: bool },
}

/// A line that the harness writes.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Ask(Ask),
    Results {
        results: Map<String, Value>,
        version: String,
    },
    Error {
        error: String,
    },
}

/// Runs the tasks and prints their results.
pub fn run(
    args: &TaskArgs,
    model_args: &ModelArgs,
    load_args: &LoadArgs,
    seed: Option<u32>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let options = args.sampling(seed.unwrap_or(SEED));
    options
        .validate()
        .map_err(|e| Failure::usage(e.to_string()))?;
    let loaded = load(model_args, load_args, console)?;
    let model = loaded.model.as_ref();
    let tokens = model
        .as_token_model()
        .ok_or_else(|| Failure::failed("this backend does not give probabilities"))?;
    let cancel = CancelToken::new();
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let chat = match (args.apply_chat_template, args.no_apply_chat_template) {
        (_, true) => false,
        (true, _) => true,
        _ => model.info().has_chat_template,
    };
    let judge = Judge {
        model,
        tokens,
        options: options.with_cancel(cancel.clone()),
        interrupt: Interrupt::new().with_cancel(cancel),
        special: !chat,
        names: args.chat_template_args.clone().unwrap_or_default().into(),
        max_tokens: args.max_tokens,
        context: load_args.ctx_size.or(model.info().context_length),
    };
    let name = model_args.model.clone();
    let name = name.unwrap_or_else(|| loaded.path.to_string_lossy().into_owned());
    let mut harness = Harness::start()?;
    harness.tell(&json!({
        "tasks": args.tasks,
        "limit": args.limit,
        "num_shots": args.num_shots,
        "include_path": args.include_path,
        "apply_chat_template": chat,
        "fewshot_as_multiturn": args.fewshot_as_multiturn,
        "confirm_run_unsafe_code": args.confirm_run_unsafe_code,
        "seed": seed.unwrap_or(SEED),
        "name": name.replace('/', "__"),
        "template": tokens.chat_template().unwrap_or_default(),
        "quiet": console.quiet,
        "verbose": console.verbose,
    }))?;
    loop {
        match harness.line()? {
            Line::Ask(ask) => {
                let answer = judge.answer(ask)?;
                harness.tell(&answer)?;
            }
            Line::Error { error } => return Err(Failure::failed(format!("lm-eval: {error}"))),
            Line::Results { results, version } => {
                if let Some(dir) = &args.output_dir {
                    args.write(dir, &name, &version, &results)?;
                }
                return console.json(&results);
            }
        }
    }
}

impl TaskArgs {
    fn sampling(&self, seed: u32) -> GenerateOptions {
        GenerateOptions::new()
            .with_temperature(self.temp)
            .with_top_p(self.top_p)
            .with_top_k(self.top_k)
            .with_seed(u64::from(seed))
    }

    /// Writes the results in the file format of `mlx_lm.evaluate`.
    fn write(
        &self,
        dir: &Path,
        model: &str,
        version: &str,
        results: &Map<String, Value>,
    ) -> Result<(), Failure> {
        let mut parts = vec!["eval".into(), model.replace('/', "_"), version.to_owned()];
        parts.extend(self.num_shots.map(|n| format!("{n:02}")));
        parts.extend(self.tasks.iter().map(|task| task.replace('/', "_")));
        let path = dir.join(parts.join("_"));
        let text = serde_json::to_string_pretty(results).unwrap_or_default();
        std::fs::create_dir_all(dir)
            .and_then(|()| std::fs::write(&path, text))
            .map_err(|e| Failure::failed(format!("cannot write {}: {e}", path.display())))
    }
}

/// Answers the requests of the harness.
struct Judge<'a> {
    model: &'a dyn TextModel,
    tokens: &'a dyn TokenModel,
    options: GenerateOptions,
    interrupt: Interrupt,
    /// Whether texts get start tokens. A chat template writes them itself.
    special: bool,
    names: Map<String, Value>,
    max_tokens: Option<usize>,
    context: Option<usize>,
}

impl Judge<'_> {
    fn answer(&self, ask: Ask) -> Result<Value, Failure> {
        match ask {
            Ask::Score {
                context,
                continuation,
            } => self.score(&context, &continuation),
            Ask::Roll { text } => {
                // As in mlx-lm, the first token is not scored, because it has no context.
                let mut ids = self.tokens.encode(&text, self.special)?;
                if ids.len() < 2 {
                    ids = self.begun(ids);
                }
                let logprobs = self
                    .tokens
                    .token_logprobs(&Prompt::Tokens(ids), &self.interrupt)?;
                let sum: f64 = logprobs.iter().map(|&p| f64::from(p)).sum();
                Ok(json!({"logprob": sum}))
            }
            Ask::Generate {
                context,
                until,
                max_tokens,
            } => {
                let ids = self.tokens.encode(&context, self.special)?;
                let most = self.max_tokens.or(max_tokens).unwrap_or(MAX_TOKENS);
                let room = self.context.map_or(most, |n| n.saturating_sub(ids.len()));
                let until: Vec<String> = until.into_iter().filter(|s| !s.is_empty()).collect();
                let options = self.options.clone();
                let options = options.with_max_tokens(most.min(room)).with_stop(until);
                let stream = self.model.generate(&Prompt::Tokens(ids), &options)?;
                Ok(json!({"text": stream.text()?}))
            }
            Ask::Chat { messages, reply } => {
                let mut prompt = ChatPrompt::new(messages).with_end(match reply {
                    true => ChatEnd::Reply,
                    false => ChatEnd::LastMessage,
                });
                prompt.template.clone_from(&self.names);
                Ok(json!({"text": self.tokens.prepare_chat(&prompt)?.text}))
            }
        }
    }

    /// The log-probability of the continuation. Each of its tokens is forced. Continuations of one
    /// context share the context's computation.
    fn score(&self, context: &str, continuation: &str) -> Result<Value, Failure> {
        let begin = self.tokens.encode(context, self.special)?;
        let full_text = format!("{context}{continuation}");
        let mut ids = self.tokens.encode(&full_text, self.special)?;
        // As in mlx-lm, the whole text is encoded, and the continuation starts after as many tokens
        // as the context has.
        let mut forced = ids.split_off(begin.len().min(ids.len()));
        if ids.is_empty() {
            ids = self.begun(std::mem::take(&mut forced));
            forced = ids.split_off(1);
        }
        if forced.is_empty() {
            return Ok(json!({"logprob": 0.0, "greedy": true}));
        }
        if let Some(context) = self.context {
            // If the context is too long, only its last tokens are used.
            let surplus = (ids.len() + forced.len()).saturating_sub(context + 1);
            ids.drain(..surplus.min(ids.len() - 1));
        }
        let options = GenerateOptions::new()
            .with_max_tokens(forced.len())
            .with_ignore_eos(true)
            .with_logprobs(1)
            .with_forced_tokens(forced)
            .with_cancel(self.interrupt.cancel.clone().unwrap_or_default());
        let (mut sum, mut greedy) = (0.0, true);
        for token in self.model.generate(&Prompt::Tokens(ids), &options)? {
            let token = token?;
            let Some(logprobs) = token.logprobs else {
                return Err(Failure::failed("this backend gives no log-probabilities"));
            };
            sum += f64::from(logprobs.logprob);
            greedy &= logprobs.top.first().is_some_and(|top| top.id == token.id);
        }
        Ok(json!({"logprob": sum, "greedy": greedy}))
    }

    /// The ids with a start token before them, so that the first id is predicted, too.
    fn begun(&self, mut ids: Vec<u32>) -> Vec<u32> {
        let bos = self.tokens.encode("", true).unwrap_or_default();
        let first = bos.first().copied();
        let first = first.or_else(|| self.tokens.eos_tokens().first().copied());
        ids.insert(0, first.unwrap_or_default());
        ids
    }
}

/// The process of the harness. Dropping this value kills the process.
struct Harness {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
    python: PathBuf,
}

impl Harness {
    fn start() -> Result<Self, Failure> {
        let python = std::env::var_os(PYTHON).filter(|python| !python.is_empty());
        let python = PathBuf::from(python.unwrap_or_else(|| "python3".into()));
        let mut command = Command::new(&python);
        command
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        // The process ignores Ctrl-C. This program receives Ctrl-C, and then ends the process.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|e| {
            Failure::failed(format!(
                "cannot run {}: {e}; {PYTHON} names a Python that has lm_eval",
                python.display()
            ))
        })?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::failed("the harness has no pipes"));
        };
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
            python,
        })
    }

    fn tell(&mut self, message: &Value) -> Result<(), Failure> {
        let told = writeln!(self.input, "{message}").and_then(|()| self.input.flush());
        told.map_err(|_| self.gone())
    }

    fn line(&mut self) -> Result<Line, Failure> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(n) if n > 0 => serde_json::from_str(&line)
                .map_err(|e| Failure::failed(format!("lm-eval says {line:?}: {e}"))),
            _ => Err(self.gone()),
        }
    }

    /// The error if the process exited unexpectedly. The process has printed its own message on
    /// standard error.
    fn gone(&mut self) -> Failure {
        let status = self.child.wait();
        let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
        Failure::failed(format!(
            "lm-eval in {} ended: {status}",
            self.python.display()
        ))
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        // The process may still run a task, so this kills it. After the last line there is nothing
        // left to lose.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
