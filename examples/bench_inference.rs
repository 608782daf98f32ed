//! Measures the speed of prefill and decode, and the time of each part of a step.
//!
//! ```text
//! cargo run --release --example bench_inference -- [MODEL]
//! ```
//!
//! Without MODEL, it uses the first known model, downloaded once. `mlx bench --profile` prints more
//! figures.

use std::path::Path;

use rust_mlx::hub;
use rust_mlx::inference::{self, GenerateOptions, Interrupt, LoadOptions, Prompt, StepPart};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = hub::resolve(std::env::args().nth(1).as_deref(), &mut hub::Silent)?;
    run(&path, (256, 64), &LoadOptions::default())
}

/// Measures with a prompt and a reply of these lengths in tokens.
pub fn run(
    path: &Path,
    (prompt, reply): (usize, usize),
    options: &LoadOptions,
) -> Result<(), Box<dyn std::error::Error>> {
    let model = inference::load_model(path, options)?;
    let vocab = model.info().vocab_size;
    // The ids are equal on every machine. Their meaning has no influence on the speed.
    let ids = (0..prompt).map(|i| (i * 7919 + 13) % vocab.max(1));
    let ids: Vec<u32> = ids.map(u32::try_from).collect::<Result<_, _>>()?;
    let prompt = Prompt::Tokens(ids);
    let mut options = GenerateOptions::default();
    options.max_tokens = reply;
    options.stop.ignore_eos = true;
    options.prefill.cache_prompt = false;
    for _ in 0..2 {
        let mut stream = model.generate(&prompt, &options)?;
        for token in stream.by_ref() {
            token?;
        }
        let metrics = stream.metrics();
        println!(
            "prefill {:.1} tok/s, decode {:.1} tok/s",
            metrics.prefill_tokens_per_second(),
            metrics.decode_tokens_per_second()
        );
    }

    let profiled = model.as_profiled().ok_or("the backend measures no parts")?;
    let profile = profiled.profile_steps(&prompt, &options, &Interrupt::new())?;
    for part in StepPart::ALL {
        let seconds = profile.total(part);
        if seconds > 0.0 {
            println!("{part:<10} {:>6.1} %", 100.0 * seconds / profile.sum());
        }
    }
    println!(
        "a step in parts takes {:.3} ms, a plain one {:.3} ms",
        profile.step_seconds * 1e3,
        profile.plain_step_seconds * 1e3
    );
    Ok(())
}
