//! The flag `--steer`: edits of the model's states, read from a file.

use std::path::PathBuf;

use inference::{Interrupt, LogitsOutput, Prompt, SteerableModel, Steering, TextModel};

use crate::cli::terminal::failure::{Failure, of_options};

/// The flag for edits of the model's states.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct SteerArgs {
    /// Change the model's states during inference, by the edits in this JSON file (docs/edits.md)
    #[arg(long, value_name = "FILE")]
    steer: Option<PathBuf>,
}

impl SteerArgs {
    /// Reads the edits, if a file is given.
    pub fn read(&self) -> Result<Option<Steering>, Failure> {
        match &self.steer {
            Some(path) => Steering::read(path).map(Some).map_err(of_options),
            None => Ok(None),
        }
    }
}

/// The model's interface for edits.
///
/// # Errors
/// If the model supports no edits.
pub fn steerable(model: &dyn TextModel) -> Result<&dyn SteerableModel, Failure> {
    model.as_steerable().ok_or_else(|| {
        let message = "this backend takes no edits; leave --steer out, or see `mlx backends`";
        Failure::failed(message)
    })
}

/// The logits after a prompt, with edits if there are any.
pub fn logits(
    model: &dyn TextModel,
    prompt: &Prompt,
    all: bool,
    steering: Option<&Steering>,
    interrupt: &Interrupt,
) -> Result<LogitsOutput, Failure> {
    if let Some(steering) = steering {
        let model = steerable(model)?;
        let logits = model.steered_logits(prompt, all, steering, interrupt);
        return logits.map_err(of_options);
    }
    let tokens = model.as_token_model().ok_or_else(|| {
        inference::Error::new(
            inference::ErrorKind::Unsupported,
            "this backend gives no logits; `mlx backends` shows which do",
        )
    })?;
    Ok(tokens.logits(prompt, all, interrupt)?)
}

/// The log-probabilities of a prompt's tokens, with edits if there are any.
pub fn logprobs(
    model: &dyn TextModel,
    prompt: &Prompt,
    steering: &Steering,
    interrupt: &Interrupt,
) -> Result<Vec<f32>, Failure> {
    let logprobs = steerable(model)?.steered_logprobs(prompt, steering, interrupt);
    logprobs.map_err(of_options)
}
