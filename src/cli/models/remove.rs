//! `mlx rm NAME`: removes a model from the caches, after confirmation.

use rust_mlx::hub::{HfHub, ModelSpec, Removed, cached_path, find};
use serde_json::json;

use crate::cli::options::preset;
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;

/// Remove a preset or a cached model after confirmation
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The name that `mlx ls` shows: owner/name (all its revisions), owner/name@revision, a known
    /// name or a preset
    #[arg(value_name = "NAME")]
    name: String,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    /// Print a JSON object about the removed files
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    // Presets come first, as in `run`. A preset is small, but a person wrote it, so the command
    // asks before it deletes the file.
    if preset::find(&args.name)?.is_some() {
        let mut removed = Removed::default();
        if !agreed(args, &removed, console)? {
            return Ok(());
        }
        removed.bytes = preset::remove(&args.name)?.unwrap_or_default();
        return report(args, &removed, console);
    }
    if let Some(model) = find(&args.name) {
        let file = cached_path(model.name)?;
        let Ok(metadata) = std::fs::metadata(&file) else {
            return Err(Failure::failed(format!(
                "{} is not in the cache",
                model.name
            )));
        };
        let mut removed = Removed::default();
        removed.bytes = match metadata.is_dir() {
            true => model.kept_bytes(),
            false => metadata.len(),
        };
        if !agreed(args, &removed, console)? {
            return Ok(());
        }
        take(&args.name)?;
        return report(args, &removed, console);
    }
    let spec = ModelSpec::parse(&args.name).ok_or_else(|| {
        Failure::usage(format!(
            "{:?} is no model's name; `mlx ls` lists those in the cache",
            args.name
        ))
    })?;
    if spec.file().is_some() {
        return Err(Failure::usage(
            "single files are not removed; leave out what follows the colon",
        ));
    }
    let hub = HfHub::from_env()?;
    if !agreed(args, &hub.would_remove(&spec)?, console)? {
        return Ok(());
    }
    let removed = hub.remove(&spec)?;
    report(args, &removed, console)
}

/// Removes a cached model without asking: a known name, or owner/name.
pub fn take(name: &str) -> Result<Removed, Failure> {
    if let Some(model) = find(name) {
        let file = cached_path(model.name)?;
        let dir = file.parent().unwrap_or(&file);
        std::fs::remove_dir_all(dir)
            .map_err(|e| Failure::failed(format!("cannot remove {}: {e}", dir.display())))?;
        return Ok(Removed::default());
    }
    let spec = ModelSpec::parse(name)
        .ok_or_else(|| Failure::failed(format!("{name:?} is no model's name")))?;
    Ok(HfHub::from_env()?.remove(&spec)?)
}

/// Asks for permission, unless a flag gives it.
fn agreed(args: &Args, what: &Removed, console: &mut Console<'_>) -> Result<bool, Failure> {
    if args.yes {
        return Ok(true);
    }
    if !console.in_is_terminal {
        return Err(Failure::usage(
            "there is no terminal to confirm on; pass --yes to remove it",
        ));
    }
    console.warn(&format!(
        "remove {}{} ({})? [y/N]",
        args.name,
        revisions(what),
        bytes(what.bytes)
    ));
    let mut answer = String::new();
    console
        .input
        .read_line(&mut answer)
        .map_err(|e| Failure::failed(format!("cannot read the answer: {e}")))?;
    let yes = matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    if !yes {
        console.note("nothing was removed");
    }
    Ok(yes)
}

fn revisions(what: &Removed) -> String {
    match what.commits.len() {
        0 | 1 => String::new(),
        n => format!(", {n} revisions"),
    }
}

fn report(args: &Args, removed: &Removed, console: &mut Console<'_>) -> Result<(), Failure> {
    if args.json {
        return console.json(&json!({
            "name": args.name,
            "revisions": removed.commits,
            "bytes": removed.bytes,
        }));
    }
    console.line(&format!(
        "removed {}{}, {} freed",
        args.name,
        revisions(removed),
        bytes(removed.bytes)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    fn args(name: &str) -> Args {
        Args {
            name: name.into(),
            yes: false,
            json: false,
        }
    }

    #[test]
    fn nothing_is_removed_without_a_yes() {
        let mut what = Removed::default();
        what.bytes = 2048;
        for (answer, yes) in [("y\n", true), ("YES\n", true), ("n\n", false), ("", false)] {
            let mut streams = Streams::new(answer);
            let mut console = streams.console();
            console.in_is_terminal = true;
            assert_eq!(
                agreed(&args("own/m"), &what, &mut console).unwrap(),
                yes,
                "{answer:?}"
            );
            assert!(
                streams.err().contains("own/m (2.0 KiB)? [y/N]"),
                "{}",
                streams.err()
            );
        }
        let mut streams = Streams::new("y\n");
        let failure = agreed(&args("own/m"), &what, &mut streams.console()).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn what_is_no_name_is_a_usage_error() {
        for name in ["nothing", "../x", "own/m:file.gguf"] {
            let mut streams = Streams::new("");
            let failure = run(&args(name), &mut streams.console()).unwrap_err();
            assert_eq!(failure.exit_code(), 2, "{name}");
        }
    }
}
