//! Library quick start: load a model by name, directory or file, and stream a reply.
//!
//! ```text
//! cargo run --release --example generate -- "What is the capital of France?" [MODEL]
//! ```
//!
//! Without MODEL it is the first known one, fetched once. This shows the API; the program `mlx`
//! is what to use from a shell.

use std::io::Write;

use rust_mlx::hub;
use rust_mlx::inference::{self, GenerateOptions, LoadOptions, Message};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let question = args
        .next()
        .unwrap_or_else(|| "What is the capital of France?".into());

    // A path, a known name, or the first model; `Silent` shows no progress while it is fetched.
    let path = hub::resolve(args.next().as_deref(), &mut hub::Silent)?;

    // No backend is named, so the best available one is chosen.
    let model = inference::load_model(&path, &LoadOptions::default())?;

    // Greedy by default; every option has a chained setter.
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
