//! `mlx arch`: lists the architectures that the MLX engine supports.

use metal_backend::{architectures, gguf_architectures};
use serde_json::json;

use crate::cli::terminal::console::{Console, table};
use crate::cli::terminal::failure::Failure;

/// List the model types that can run, and their names in GGUF files
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let gguf = |name: &str| {
        gguf_architectures()
            .into_iter()
            .find(|(_, model_type)| *model_type == name)
            .map(|(gguf, _)| gguf)
    };
    if args.json {
        let all: Vec<_> = architectures()
            .into_iter()
            .map(|name| json!({"model_type": name, "gguf": gguf(name)}))
            .collect();
        return console.json(&all);
    }
    let mut rows = vec![vec!["MODEL TYPE".to_owned(), "GGUF".to_owned()]];
    rows.extend(
        architectures()
            .into_iter()
            .map(|name| vec![name.to_owned(), gguf(name).unwrap_or("-").to_owned()]),
    );
    for line in table(&rows) {
        console.line(&line)?;
    }
    Ok(())
}
