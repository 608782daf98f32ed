//! Flags of the engine's computation. They change the cost of a reply, not its text.

use inference::GenerateOptions;

use crate::cli::options::load::at_least_one;
use crate::cli::terminal::failure::Failure;

/// How the engine goes about it.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Positions of the prompt in one forward pass
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    pub prefill_step_size: usize,
}

/// Who guesses tokens: for commands that run one request at a time.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct DraftArgs {
    /// A smaller model with the same vocabulary that guesses tokens: the reply is the same, sooner
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Tokens guessed at a time, with --draft-model or --prompt-lookup
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub num_draft_tokens: usize,
    /// Guess what followed the last N tokens where they stood before; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prompt_lookup: usize,
}

impl EngineArgs {
    /// Sets these options in `options`, and checks them.
    pub fn apply(&self, options: &mut GenerateOptions) -> Result<(), Failure> {
        options.prefill.prefill_step_size = self.prefill_step_size;
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))
    }
}

impl DraftArgs {
    /// Sets these options in `options`, and checks them.
    pub fn apply(&self, options: &mut GenerateOptions) -> Result<(), Failure> {
        options.speculative.num_draft_tokens = self.num_draft_tokens;
        options.speculative.prompt_lookup = self.prompt_lookup;
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))
    }
}
