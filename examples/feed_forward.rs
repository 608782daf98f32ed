//! Feed-forward backends in a program. Compares a model's predictions in five cases: with its own
//! feed-forward parts, a few features, cached outputs, no feed-forward parts, and a backend defined
//! here.
//!
//! ```text
//! cargo run --release --example feed_forward -- [MODEL [PROMPT]]
//! ```

use std::path::Path;
use std::sync::Arc;

use rust_mlx::hub;
use rust_mlx::inference::{Interrupt, LoadOptions, Prompt, TextModel};
use rust_mlx::metal_backend::ffn::{
    self, CachedFfn, DenseFfn, FfnBackend, FfnPart, FfnRouter, HighwayFfn, SparseFfn,
};
use rust_mlx::mlx::{Array, Result as ArrayResult};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The trained part, but without features whose activation is negative.
#[derive(Debug)]
struct OnlyPositive;

impl FfnBackend for OnlyPositive {
    fn name(&self) -> &str {
        "only positive"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> ArrayResult<Array> {
        Ok(self.forward_with_activation(part, x)?.0)
    }

    fn forward_with_activation(
        &self,
        part: &FfnPart<'_>,
        x: &Array,
    ) -> ArrayResult<(Array, Array)> {
        let zero = Array::scalar(0.0f32)?.astype(x.dtype())?;
        let activations = part.activations(x)?.maximum(&zero)?; // [.., features]
        Ok((part.down(&activations)?, activations))
    }
}

/// The three most probable next tokens.
fn predict(model: &dyn TextModel, prompt: &Prompt) -> Result<String, Failure> {
    let routed = model.as_routed().ok_or("the model has no backend")?;
    let tokens = model.as_token_model().ok_or("the model shows no logits")?;
    let logits = routed.routed_logits(prompt, false, &Interrupt::new())?;
    let logits = logits.logits;
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|x| (x - greatest).exp()).sum();
    let mut order: Vec<u32> = (0..u32::try_from(logits.len())?).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    let mut shown = Vec::new();
    for id in order.into_iter().take(3) {
        let share = (logits[id as usize] - greatest).exp() / sum;
        shown.push(format!("{:?} {share:.3}", tokens.decode(&[id])?));
    }
    Ok(shown.join(", "))
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let path = hub::resolve(args.next().as_deref(), &mut hub::Silent)?;
    let prompt = Prompt::from(args.next().unwrap_or("The capital of France is".to_owned()));
    let load = |path: &Path, backend: Arc<dyn FfnBackend>| {
        ffn::load_model(path, &LoadOptions::new(), &FfnRouter::uniform(backend))
    };
    let all: [Arc<dyn FfnBackend>; 4] = [
        Arc::new(DenseFfn),
        Arc::new(SparseFfn { top_k: 256 }),
        Arc::new(OnlyPositive),
        Arc::new(HighwayFfn),
    ];
    for backend in all {
        let model = load(&path, Arc::clone(&backend))?;
        println!(
            "{:>14}: {}",
            backend.name(),
            predict(model.as_ref(), &prompt)?
        );
    }
    let cached = Arc::new(CachedFfn::new());
    let model = load(&path, cached.clone())?;
    let rows = cached.calibrate(model.as_ref(), &prompt)?;
    let answer = predict(model.as_ref(), &prompt)?;
    println!("{:>14}: {answer}", cached.name());
    println!("{} of {rows} recorded rows were used", cached.hits());
    Ok(())
}
