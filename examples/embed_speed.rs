//! Measures how many texts per second a model embeds, as the best run within some seconds. It reads
//! a JSON list of texts from standard input. `tools/compare/encoders.py` compares the result with
//! other engines.
//!
//!     cargo run --release --example embed_speed -- DIR SECONDS < texts.json

use std::time::{Duration, Instant};

use inference::{EmbedOptions, Interrupt, LoadOptions, Prompt};
use metal_backend as _; // keeps the linker from dropping the registration

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("the model's directory is missing")?;
    let seconds: f64 = args.next().ok_or("the seconds are missing")?.parse()?;
    let texts: Vec<String> = serde_json::from_reader(std::io::stdin())?;
    let prompts: Vec<Prompt> = texts.into_iter().map(Prompt::from).collect();
    let model = inference::load_model(model, &LoadOptions::new().with_backend("cpu"))?;
    let embedder = model.as_embedding_model().ok_or("it makes no vectors")?;
    let options = EmbedOptions::new().with_truncate(true);
    let run = || embedder.embed(&prompts, &options, &Interrupt::new());
    run()?;
    let (mut best, end) = (
        f64::INFINITY,
        Instant::now() + Duration::from_secs_f64(seconds),
    );
    while Instant::now() < end {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("{}", prompts.len() as f64 / best);
    Ok(())
}
