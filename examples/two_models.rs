//! Runs two models in two threads of one process. Measures the speed of each alone, and of both
//! together.
//!
//! ```text
//! cargo run --release --example two_models -- [MODEL [TOKENS]]
//! ```
//!
//! MLX builds graphs under a lock for the whole process (see the documentation of `mlx_rs_core`),
//! but computes them without the lock. The figures show which speed remains when two models share
//! the processor.

use std::thread;
use std::time::Instant;

use rust_mlx::hub;
use rust_mlx::inference::{self, GenerateOptions, LoadOptions, Message, TextModel};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Generates `tokens` tokens, and returns the number of generated tokens.
fn generate(model: &dyn TextModel, tokens: usize) -> Result<usize, Failure> {
    let options = GenerateOptions::default()
        .with_max_tokens(tokens)
        .with_ignore_eos(true);
    let question = [Message::user("Count to a thousand.")];
    let mut stream = model.chat(&question, &options)?;
    for token in stream.by_ref() {
        token?;
    }
    Ok(stream.metrics().generated_tokens)
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let path = hub::resolve(args.next().as_deref(), &mut hub::Silent)?;
    let tokens = args.next().map_or(Ok(128), |count| count.parse())?;
    let load = || inference::load_model(&path, &LoadOptions::default());
    let models = [load()?, load()?];
    for round in 1..=3 {
        let start = Instant::now();
        let alone = generate(models[0].as_ref(), tokens)?;
        let alone = alone as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        let both = thread::scope(|scope| {
            let threads = models
                .each_ref()
                .map(|model| scope.spawn(|| generate(model.as_ref(), tokens)));
            threads.into_iter().try_fold(0, |sum, thread| {
                let count = thread.join().map_err(|_| "a thread panicked")??;
                Ok::<_, Failure>(sum + count)
            })
        })?;
        let both = both as f64 / start.elapsed().as_secs_f64();
        println!("round {round}: alone {alone:.1} tokens/s, two at once {both:.1} together");
    }
    Ok(())
}
