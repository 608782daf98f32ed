//! Flags of the engine. They change the cost of a reply, not its text.

use inference::GenerateOptions;

use crate::cli::options::load::at_least_one;
use crate::cli::terminal::failure::Failure;

/// Flags of prefill.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Number of prompt positions per forward pass
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    pub prefill_step_size: usize,
}

/// Flags of speculative decoding.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct DraftArgs {
    /// A smaller model with the same vocabulary that drafts tokens: faster, with an unchanged reply
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Number of drafted tokens per step, with --draft-model or --prompt-lookup
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub num_draft_tokens: usize,
    /// Draft the tokens that followed the last N tokens at their previous occurrence; 0 disables it
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
