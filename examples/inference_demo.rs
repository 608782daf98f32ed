//! Shows how a model arrives at its answer: the most likely next tokens of a prompt, the prediction
//! of each layer, and a short reply.
//!
//! ```text
//! cargo run --release --example inference_demo -- "The capital of France is" [MODEL]
//! ```
//!
//! Without MODEL, it uses the first known model, downloaded once.

use std::path::Path;

use rust_mlx::hub;
use rust_mlx::inference::{self, GenerateOptions, Interrupt, LoadOptions, Prompt};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let prompt = args
        .next()
        .unwrap_or_else(|| "The capital of France is".into());
    let path = hub::resolve(args.next().as_deref(), &mut hub::Silent)?;
    run(&path, &prompt, &LoadOptions::default())
}

/// Prints all results for one prompt.
pub fn run(
    path: &Path,
    prompt: &str,
    options: &LoadOptions,
) -> Result<(), Box<dyn std::error::Error>> {
    let model = inference::load_model(path, options)?;
    let tokens = model
        .as_token_model()
        .ok_or("the backend shows no logits")?;
    let inspector = (model.as_attention_inspector()).ok_or("the backend shows no states")?;
    let ids = tokens.encode(prompt, true)?;
    let last = ids.len().checked_sub(1).ok_or("the prompt is empty")?;
    let prompt = Prompt::Tokens(ids);

    // Finds the five most likely tokens by softmax.
    let logits = tokens.logits(&prompt, false, &Interrupt::new())?.logits;
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|x| f64::from(x - greatest).exp()).sum();
    let mut best: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (id, logit) in best.iter().take(5) {
        let share = f64::from(logit - greatest).exp() / total;
        println!("{share:.4}  {:?}", tokens.decode(&[*id])?);
    }

    // Computes the prediction of each layer with the model's last norm and head.
    let states = inspector.hidden_states(&prompt, &[last], &Interrupt::new())?;
    for (layer, state) in states.blocks.iter().enumerate() {
        let logits = inspector.unembed(state)?.pop().unwrap_or_default();
        let mut ids = (0u32..).zip(&logits);
        let first = ids.next().ok_or("there are no logits")?;
        let (id, _) = ids.fold(
            first,
            |best, next| if next.1 > best.1 { next } else { best },
        );
        println!("after layer {layer:>2}: {:?}", tokens.decode(&[id])?);
    }

    let options = GenerateOptions::default().with_max_tokens(16);
    let reply = model.generate(&prompt, &options)?.collect_output()?;
    println!("{}", reply.text);
    Ok(())
}
