//! `mlx cache-prompt`: computes a prompt once and saves its cache in a file.

use std::path::PathBuf;

use inference::{ChatEnd, ChatPrompt, Interrupt, Message, Prompt};
use serde_json::json;

use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::options::prompt::read_text;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Compute a prompt once and save its cache in a file, for `mlx generate --prompt-cache-file`
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The start of the user's message; `-` reads it from standard input
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Use the prompt unchanged, without the model's chat template
    #[arg(long, alias = "ignore-chat-template")]
    raw: bool,
    /// The file to write, in mlx-lm's format; an existing file is replaced
    #[arg(long, value_name = "FILE")]
    prompt_cache_file: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let text = read_text(&args.prompt, console)?;
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded
        .model
        .as_prompt_cache()
        .ok_or_else(|| Failure::failed("this backend keeps no prompts in files"))?;
    let prompt = match loaded.model.as_token_model() {
        Some(tokens) if !args.raw && loaded.model.info().has_chat_template => {
            let chat = ChatPrompt::new([Message::user(text)]).with_end(ChatEnd::LastMessage);
            tokens.prepare_chat(&chat)?.into()
        }
        _ => Prompt::Text(text),
    };
    let tokens = model.save_prompt_cache(&prompt, &args.prompt_cache_file, &Interrupt::new())?;
    let bytes = std::fs::metadata(&args.prompt_cache_file)
        .map_err(|e| Failure::failed(format!("{}: {e}", args.prompt_cache_file.display())))?
        .len();
    console.json(&json!({
        "file": args.prompt_cache_file.to_string_lossy(),
        "tokens": tokens,
        "bytes": bytes,
    }))
}
