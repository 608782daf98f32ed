//! Defaults of `mlx serve` for fields that a request omits, and flags for loading models that only
//! the server has.

use clap::ValueEnum;
use inference::{GenerateOptions, LoadOptions, Parameter};
use inference_server::RequestDefaults;

use crate::cli::options::cache::{CacheDirArgs, KvArgs};
use crate::cli::options::dialog::{self, Names};
use crate::cli::options::engine::DraftArgs;
use crate::cli::options::load::at_least_one;
use crate::cli::options::parameters::{Otherwise, ParameterFlags};
use crate::cli::terminal::failure::Failure;

/// Adds the default to a flag's help text.
#[derive(Debug)]
pub struct OfTheApi;

impl Otherwise for OfTheApi {
    fn note(_: &Parameter) -> String {
        "[default: that of the API a request uses]".into()
    }
}

/// Defaults for requests that omit a field.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Requests that do not say otherwise")]
pub struct DefaultArgs {
    #[command(flatten)]
    parameters: ParameterFlags<OfTheApi>,
    /// Maximum tokens of a reply [default: up to the end of the context]
    #[arg(long, short = 'n', aliases = ["predict", "n-predict"], value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    /// Prompt tokens per step, which a step computes together with tokens of other replies
    /// [default: 512]
    #[arg(long, aliases = ["batch-size", "ubatch-size"], value_name = "N", value_parser = at_least_one)]
    prefill_step_size: Option<usize>,
    /// Variables for the chat template, as a JSON object: `{"enable_thinking": false}`
    #[arg(long, aliases = ["chat-template-args", "chat-template-kwargs"], value_name = "JSON")]
    chat_template_config: Option<Names>,
}

impl DefaultArgs {
    /// Returns these values as request defaults, together with the values of the draft flags.
    pub fn defaults(&self, draft: &DraftArgs) -> Result<RequestDefaults, Failure> {
        let mut defaults = RequestDefaults::new();
        let mut options = GenerateOptions::new();
        draft.apply(&mut options)?;
        defaults.speculative = options.speculative;
        defaults.parameters = self.parameters.values.clone();
        defaults.max_tokens = self.max_tokens;
        defaults.prefill_step_size = self.prefill_step_size;
        if let Some(names) = &self.chat_template_config {
            defaults.template = names.clone().into();
        }
        Ok(defaults)
    }
}

/// The flags for loading models.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "How models are loaded")]
pub struct CacheArgs {
    /// A chat template instead of the models' own: a file with Jinja, or the template itself
    #[arg(long, alias = "chat-template-file", value_name = "FILE")]
    chat_template: Option<String>,
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    dir: CacheDirArgs,
}

impl CacheArgs {
    /// Sets the flags in `options`.
    pub fn set(&self, options: &mut LoadOptions) -> Result<(), Failure> {
        if let Some(template) = &self.chat_template {
            options.chat_template = Some(dialog::source(template)?);
        }
        self.dir.set(options);
        self.kv.check()?;
        self.kv.set(options);
        Ok(())
    }
}

/// How much to log. Aliases are the level names of Python's `logging`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Log nothing.
    Off,
    /// Log failures.
    #[value(alias = "critical")]
    Error,
    /// Also log possible problems.
    #[value(alias = "warning")]
    Warn,
    /// Also log what the server does.
    Info,
    /// Also log each step.
    Debug,
    /// Log everything.
    Trace,
}

impl LogLevel {
    /// The level's name for a log filter.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
