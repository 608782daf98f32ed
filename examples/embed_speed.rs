//! Measures how many texts per second a model embeds. Each line of standard input is a JSON object
//! with `texts` and `seconds`. Each line of output has the median rate of the runs in that time,
//! the number of their texts, and the first vector. `tools/compare_embed.py` compares the results
//! with other engines.
//!
//!     cargo run --release --example embed_speed -- DIR

use std::io::{BufRead as _, Write as _};
use std::time::Instant;

use inference::{EmbedOptions, Interrupt, LoadOptions, Prompt};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("the model is missing")?;
    // The program `mlx` does the same: the next pass reuses the memory that a pass frees.
    metal_backend::keep_freed(256 << 20);
    let model = inference::load_model(model, &LoadOptions::new().with_backend("cpu"))?;
    let embedder = model.as_embedding_model().ok_or("it makes no vectors")?;
    let options = EmbedOptions::new();
    for line in std::io::stdin().lock().lines() {
        let ask: Value = serde_json::from_str(&line?)?;
        let seconds = ask["seconds"].as_f64().ok_or("the seconds are missing")?;
        let texts = ask["texts"].as_array().ok_or("the texts are missing")?;
        let texts = texts.iter().filter_map(Value::as_str);
        let prompts: Vec<Prompt> = texts.map(Prompt::from).collect();
        let run = || embedder.embed(&prompts, &options, &Interrupt::new());
        let mut vectors = Vec::new();
        let (mut times, begin) = (Vec::new(), Instant::now());
        while times.is_empty() || begin.elapsed().as_secs_f64() < seconds {
            let start = Instant::now();
            vectors = run()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let rate = prompts.len() as f64 / times[times.len() / 2];
        let count = prompts.len() * times.len();
        println!(
            "{}",
            json!({"rate": rate, "count": count, "vector": vectors.first()})
        );
        std::io::stdout().flush()?;
    }
    Ok(())
}
