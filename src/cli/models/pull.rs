//! `mlx pull NAME`: fetches a model into the cache.

use rust_mlx::hub;

use crate::cli::terminal::console::{Console, bytes, table};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::HubProgress;

/// Fetch a model into the cache and print its path
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["name", "list"])))]
pub struct Args {
    /// A known name, or owner/name[@revision][:FILE.gguf or :QUANTIZATION] on the Hugging Face Hub
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Hash a cached file again, and download it again if it is damaged
    #[arg(long, conflicts_with = "list")]
    verify: bool,
    /// List the known models instead
    #[arg(long)]
    list: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let Some(name) = &args.name else {
        return list(console);
    };
    let mut progress = HubProgress::new(console);
    let path = match hub::ModelSpec::parse(name) {
        Some(spec) if hub::find(name).is_none() => {
            hub::HfHub::from_env()?.pull(&spec, args.verify, &mut progress)
        }
        _ if args.verify => hub::verify(name, &mut progress),
        _ => hub::fetch(name, &mut progress),
    }?;
    console.line(&path.to_string_lossy())
}

fn list(console: &mut Console<'_>) -> Result<(), Failure> {
    let mut rows = vec![
        ["NAME", "SIZE", "CACHED", "LICENSE", "ABOUT"]
            .map(String::from)
            .to_vec(),
    ];
    for model in hub::catalog() {
        let cached = if hub::is_cached(model.name)? {
            "yes"
        } else {
            "no"
        };
        rows.push(vec![
            model.name.into(),
            bytes(model.bytes),
            cached.into(),
            model.license.into(),
            model.about.into(),
        ]);
    }
    for line in table(&rows) {
        console.line(&line)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    #[test]
    fn unknown_names_list_the_known_ones() {
        let mut streams = Streams::new("");
        let args = Args {
            name: Some("nothing".into()),
            verify: false,
            list: false,
        };
        let failure = run(&args, &mut streams.console()).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        assert!(failure.report().unwrap().contains("smollm2-135m-instruct"));
    }

    #[test]
    fn the_list_names_every_known_model() {
        let mut streams = Streams::new("");
        let args = Args {
            name: None,
            verify: false,
            list: true,
        };
        run(&args, &mut streams.console()).unwrap();
        for model in hub::catalog() {
            assert!(streams.out().contains(model.name));
        }
    }
}
