//! `mlx push owner/name`: uploads a model to the Hugging Face Hub.

use std::path::PathBuf;

use rust_mlx::hub::{HfHub, ModelSpec, PushOptions};
use serde_json::json;

use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::HubProgress;

/// Upload a model, an adapter or a .gguf file to the Hugging Face Hub
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The repository, `OWNER/NAME` or `OWNER/NAME@BRANCH`; a missing repository is created
    #[arg(value_name = "NAME", required_unless_present = "upload_repo")]
    name: Option<String>,
    /// The same as NAME, under mlx-lm's name for the flag
    #[arg(long, value_name = "NAME", hide = true, conflicts_with = "name")]
    upload_repo: Option<String>,
    /// The directory or file to upload
    #[arg(long, value_name = "PATH", default_value = "mlx_model")]
    path: PathBuf,
    /// Make a new repository private
    #[arg(long)]
    private: bool,
    /// The first line of the commit
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let name = args.name.as_ref().or(args.upload_repo.as_ref());
    let name = name.map(String::as_str).unwrap_or_default();
    let spec = ModelSpec::parse(name)
        .ok_or_else(|| Failure::usage(format!("{name:?} is not a repository; give owner/name")))?;
    let mut options = PushOptions::default();
    options.private = args.private;
    if let Some(message) = &args.message {
        options.message.clone_from(message);
    }
    let hub = HfHub::from_env()?;
    let pushed = hub.push(&spec, &args.path, &options, &mut HubProgress::new(console))?;
    if args.json {
        return console.json(&json!({
            "url": pushed.url,
            "files": pushed.files,
            "sent_bytes": pushed.sent,
        }));
    }
    console.note(&format!(
        "{} files, {} sent; what the hub had already was not sent again",
        pushed.files,
        bytes(pushed.sent)
    ));
    console.line(&pushed.url)
}
