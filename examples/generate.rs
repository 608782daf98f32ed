//! Library quick start: load a model by name, directory or file, and stream a reply.
//!
//! ```text
//! cargo run --release --example generate -- "What is the capital of France?" [MODEL]
//! ```
//!
//! Without MODEL, it uses the first known model, downloaded once. This example shows the library;
//! from a shell, use the program `mlx`.

use std::io::Write;

use rust_mlx::hub;
use rust_mlx::inference::{self, GenerateOptions, LoadOptions, Message};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let question = args
        .next()
        .unwrap_or_else(|| "What is the capital of France?".into());

    // The argument is a path or a known name; without it, the first model is used. `Silent` hides
    // the download progress.
    let path = hub::resolve(args.next().as_deref(), &mut hub::Silent)?;

    // The options name no backend, so the best available one is chosen.
    let model = inference::load_model(&path, &LoadOptions::default())?;

    // Decoding is greedy by default. Each option has a chained setter.
    let options = GenerateOptions::default().with_max_tokens(64);
    let mut stream = model.chat(&[Message::user(question)], &options)?;

    let mut out = std::io::stdout().lock();
    for token in stream.by_ref() {
        out.write_all(token?.text.as_bytes())?;
        out.flush()?;
    }
    writeln!(out)?;

    let metrics = stream.metrics();
    eprintln!(
        "{} tokens at {:.1} tok/s",
        metrics.generated_tokens,
        metrics.decode_tokens_per_second()
    );
    Ok(())
}
