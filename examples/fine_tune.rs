//! Fine-tunes a model from a program: trains an adapter on the example data, then prints a reply of
//! the trained model.
//!
//!     cargo run --release --example fine_tune -- [MODEL] [ADAPTER_DIRECTORY]

use std::path::PathBuf;

use rust_mlx::hub;
use rust_mlx::inference::{CancelToken, GenerateOptions, LoadOptions, Message, Result};
use rust_mlx::metal_backend::train::config::TrainConfig;
use rust_mlx::metal_backend::train::{Event, Run, Start};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = match arguments.next() {
        Some(path) => PathBuf::from(path),
        None => hub::first_model()?,
    };
    let config = TrainConfig {
        data: Some("examples/data/pirate".into()),
        adapter_path: arguments.next().unwrap_or_else(|| "adapters".into()).into(),
        mask_prompt: true,
        iters: 60,
        learning_rate: 2e-4,
        num_layers: -1,
        ..TrainConfig::default()
    };
    let mut run = Run::prepare(&model, &LoadOptions::new(), config, Start::Fresh)?;
    // Another thread or a signal handler may cancel the run. The run then saves its state, and
    // `Start::Resume` continues it.
    let cancel = CancelToken::new();
    let summary = run.train(&cancel, &mut |event| match event {
        Event::Train(report) => println!("step {}: loss {:.3}", report.step, report.loss),
        Event::Validation(score) => println!("step {}: validation {:.3}", score.step, score.loss),
        Event::Saved { dir, .. } => println!("saved in {}", dir.display()),
        _ => {}
    })?;
    println!("{} tokens were learned from", summary.trained_tokens);

    // The trained model can reply immediately. Later, `LoadOptions::with_adapter_path` loads the
    // adapter.
    let question = [Message::user("What is 3 plus 5?")];
    let options = GenerateOptions::new().with_max_tokens(40);
    let answer = run.trainer().model().chat(&question, &options)?.text()?;
    println!("{answer}");
    Ok(())
}
